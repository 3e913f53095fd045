/* Options by the names that newer C libraries use, and one that receives: on a lifted stream they have
 * the effect that they have on TCP. */
#include <asm/socket.h>

#include "pair.h"

static void set_limit(int fd, int name, long ms) {
  const struct timeval limit = {ms / 1000, ms % 1000 * 1000};
  show("limit set", setsockopt(fd, SOL_SOCKET, name, &limit, sizeof(limit)));
}

static void use_limits(struct Pair* pair) {
  open_stream(pair);
  char byte;
  set_limit(pair->stream, SO_RCVTIMEO_NEW, 200);
  const int64_t start = now_ns();
  show("recv", recv(pair->stream, &byte, 1, 0));
  measure("after ms", ms_since(start), 300);
  set_limit(pair->stream, SO_SNDTIMEO_NEW, 200);
  static char block[1 << 20];
  long r;
  while ((r = send(pair->stream, block, sizeof(block), MSG_NOSIGNAL)) > 0) continue;
  show("send", r);
  tell(pair);
  await(pair);
}

static void say_nothing(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  tell(pair);
}

static void map_bytes(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  settle();
  struct tcp_zerocopy_receive request;
  memset(&request, 0, sizeof(request));
  socklen_t size = sizeof(request);
  show("getsockopt", getsockopt(pair->stream, IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE, &request, &size));
  say("%u bytes to be read otherwise", request.recv_skip_hint);
  receive_pattern(pair->stream, 100, 0);
  send_pattern(pair->stream, 50000, 0);
}

static void send_few(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, 100, 0);
  tell(pair);
  receive_pattern(pair->stream, 50000, 0);
  drain("drained", pair->stream);
}

static void stamp_times(struct Pair* pair) {
  open_stream(pair);
  const int on = 1;
  show("set", setsockopt(pair->stream, SOL_SOCKET, SO_TIMESTAMPNS_NEW, &on, sizeof(on)));
  /* The kernel begins to stamp packets a little later (netstamp_work in net/core/dev.c). */
  sleep_ms(100);
  tell(pair);
  char bytes[100], control[256];
  struct iovec iov = {bytes, sizeof(bytes)};
  struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
                       .msg_controllen = sizeof(control)};
  show("recvmsg", recvmsg(pair->stream, &msg, MSG_WAITALL));
  const struct cmsghdr* c = CMSG_FIRSTHDR(&msg);
  say("stamped: %d", c != NULL && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_TIMESTAMPNS_NEW);
}

static void send_when_told(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  send_pattern(pair->stream, 100, 0);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"time_limits", use_limits, say_nothing, true},
    {"zerocopy_receive", map_bytes, send_few, true},
    {"time_stamps", stamp_times, send_when_told, true},
};
PAIR_MAIN(kCases)
