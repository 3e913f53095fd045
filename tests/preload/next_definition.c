/* A library behind the interposer with a definition of its own: the next one, which must be called. loader_calls looks
 * whether it was; to every other program it is libc's. */
#define _GNU_SOURCE
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int next_definition_calls = 0;

int listen(int fd, int backlog) {
  ++next_definition_calls;
  return (int)syscall(SYS_listen, fd, backlog);
}
