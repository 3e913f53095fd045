/* A stranger at an RDMA port: one connection request with any private data, and what comes back.
 *
 *   cm_call ADDRESS PORT FROM HEX [COUNT]
 *
 * FROM is the local address to call from. Prints for each call the event's name, its status and the private data of the answer
 * in hex; `silent` after 5 s without one. Never sends on the connection.
 */
#include <poll.h>
#include <rdma/rdma_cma.h>

#include "lab_net.h"

static struct rdma_event_channel* channel;

/* The next event's type, or -1 after 5 s; prints an answer's private data. */
static int next_event(bool show) {
  struct pollfd wait = {channel->fd, POLLIN, 0};
  if (poll(&wait, 1, 5000) != 1) return -1;
  struct rdma_cm_event* event;
  if (rdma_get_cm_event(channel, &event) != 0) give_up("rdma_get_cm_event", -1);
  int type = event->event;
  if (show) {
    printf("%s %d ", rdma_event_str(event->event), event->status);
    const uint8_t* data = event->param.conn.private_data;
    for (int i = 0; i < event->param.conn.private_data_len; ++i) printf("%02x", data[i]);
    printf("\n");
    fflush(stdout);
  }
  rdma_ack_cm_event(event);
  return type;
}

static void call(const char* address, int port, const char* from, const uint8_t* data, uint8_t size) {
  struct rdma_cm_id* id;
  struct sockaddr_storage to, local;
  address_of(address, port, &to);
  address_of(from, 0, &local);
  if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) != 0) give_up("rdma_create_id", -1);
  if (rdma_resolve_addr(id, (struct sockaddr*)&local, (struct sockaddr*)&to, 2000) != 0) give_up("resolve", -1);
  if (next_event(false) != RDMA_CM_EVENT_ADDR_RESOLVED) give_up("address", 0);
  if (rdma_resolve_route(id, 2000) != 0 || next_event(false) != RDMA_CM_EVENT_ROUTE_RESOLVED) give_up("route", 0);
  struct ibv_pd* pd = ibv_alloc_pd(id->verbs);
  struct ibv_qp_init_attr wanted = {.qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
  if (rdma_create_qp(id, pd, &wanted) != 0) give_up("rdma_create_qp", -1);
  struct rdma_conn_param how = {.private_data = data, .private_data_len = size, .retry_count = 3};
  if (rdma_connect(id, &how) != 0) give_up("rdma_connect", -1);
  if (next_event(true) < 0) announce("silent");
  rdma_destroy_qp(id);
  ibv_dealloc_pd(pd);
  rdma_destroy_id(id);
}

int main(int argc, char** argv) {
  if (argc < 5) give_up("usage", 0);
  uint8_t data[56];
  size_t size = strlen(argv[4]) / 2;
  if (size > sizeof(data)) give_up("too long", (long)size);
  for (size_t i = 0; i < size; ++i) {
    unsigned byte;
    if (sscanf(argv[4] + 2 * i, "%2x", &byte) != 1) give_up("no hex", (long)i);
    data[i] = (uint8_t)byte;
  }
  channel = rdma_create_event_channel();
  if (channel == NULL) give_up("rdma_create_event_channel", -1);
  int count = argc > 5 ? atoi(argv[5]) : 1;
  for (int i = 0; i < count; ++i) call(argv[1], atoi(argv[2]), argv[3], data, (uint8_t)size);
  return 0;
}
