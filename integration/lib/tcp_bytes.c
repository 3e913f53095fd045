/* On its own: linux/tcp.h, which knows these counts, and netinet/tcp.h exclude each other.
 *
 * By the system call itself: through libc the shim would count its own bytes in. */
#include "tcp_bytes.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>

static long kernels_getsockopt(long fd, long level, long name, void* value, socklen_t* size) {
#if defined(__x86_64__)
  long result = SYS_getsockopt;
  register void* r10 __asm__("r10") = value;
  register socklen_t* r8 __asm__("r8") = size;
  __asm__ volatile("syscall"
                   : "+a"(result)
                   : "D"(fd), "S"(level), "d"(name), "r"(r10), "r"(r8)
                   : "rcx", "r11", "memory");
  return result;
#elif defined(__aarch64__)
  register long x8 __asm__("x8") = SYS_getsockopt;
  register long x0 __asm__("x0") = fd;
  register long x1 __asm__("x1") = level;
  register long x2 __asm__("x2") = name;
  register void* x3 __asm__("x3") = value;
  register socklen_t* x4 __asm__("x4") = size;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
  return x0;
#endif
}

uint64_t tcp_bytes(int fd) {
  struct tcp_info info;
  memset(&info, 0, sizeof(info));
  socklen_t size = sizeof(info);
  if (kernels_getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return info.tcpi_bytes_sent + info.tcpi_notsent_bytes + info.tcpi_bytes_received;
}
