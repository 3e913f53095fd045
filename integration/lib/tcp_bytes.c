/* On its own: linux/tcp.h, which knows these counts, and netinet/tcp.h exclude each other.
 *
 * By the system call itself: through libc the shim would count its own bytes in. */
#include "tcp_bytes.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "raw_call.h"

uint64_t tcp_bytes(int fd) {
  struct tcp_info info;
  memset(&info, 0, sizeof(info));
  socklen_t size = sizeof(info);
  if (raw_call(SYS_getsockopt, fd, IPPROTO_TCP, TCP_INFO, (long)&info, (long)&size, 0) != 0) return 0;
  return info.tcpi_bytes_sent + info.tcpi_notsent_bytes + info.tcpi_bytes_received;
}
