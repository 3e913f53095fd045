/* On its own: linux/tcp.h, which knows these counts, and netinet/tcp.h exclude each other. */
#include "tcp_bytes.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

uint64_t tcp_bytes(int fd) {
  struct tcp_info info;
  memset(&info, 0, sizeof(info));
  socklen_t size = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return info.tcpi_bytes_sent + info.tcpi_notsent_bytes + info.tcpi_bytes_received;
}
