/* The names that _FORTIFY_SOURCE makes of read, recv, recvfrom, poll, ppoll and FD_SET: Debian builds everything
 * with them. */
#include "pair.h"

ssize_t __read_chk(int, void*, size_t, size_t);
ssize_t __recv_chk(int, void*, size_t, size_t, int);
ssize_t __recvfrom_chk(int, void*, size_t, size_t, int, struct sockaddr*, socklen_t*);
int __poll_chk(struct pollfd*, nfds_t, int, size_t);
int __ppoll_chk(struct pollfd*, nfds_t, const struct timespec*, const sigset_t*, size_t);
long __fdelt_chk(long);

static void reader(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  char text[64] = "";
  struct sockaddr_in from;
  socklen_t size = sizeof(from);
  struct pollfd one = {fd, POLLIN, 0};
  struct timespec limit = {0, 20000000};
  uint64_t carried = tcp_carried(fd);
  show("poll, nothing", __poll_chk(&one, 1, 20, sizeof(one)));
  show("ppoll, nothing", __ppoll_chk(&one, 1, &limit, NULL, sizeof(one)));
  tell(pair);
  show("poll", __poll_chk(&one, 1, 5000, sizeof(one)));
  show_events("  says", one.revents);
  await(pair);
  settle();
  show("ppoll", __ppoll_chk(&one, 1, &limit, NULL, sizeof(one)));
  show("read", __read_chk(fd, text, 4, sizeof(text)));
  say("%.4s", text);
  show("recv", __recv_chk(fd, text, 4, sizeof(text), MSG_PEEK));
  say("%.4s", text);
  show("recvfrom", __recvfrom_chk(fd, text, 12, sizeof(text), 0, (struct sockaddr*)&from, &size));
  say("%.12s, name of %u", text, size);
  fd_set in;
  FD_ZERO(&in);
  in.fds_bits[__fdelt_chk(fd)] |= 1l << (fd % 64);
  show("select", select(fd + 1, &in, NULL, NULL, &(struct timeval){0, 0}));
  show_lifted("all this", fd, carried);
  /* too long for its buffer: the process ends, as with libc's own */
  pid_t child = (pid_t)CHECKED(fork());
  if (child == 0) {
    close(2);
    __recv_chk(fd, text, 100, sizeof(text), 0);
    _exit(0);
  }
  int status = 0;
  CHECKED(waitpid(child, &status, 0));
  say("overflow: signal %d", WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

static void writer(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  CHECKED(send(pair->stream, "0123456789abcdef", 16, 0));
  tell(pair);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"server", reader, writer, true},
    {"client", writer, reader, true},
};
PAIR_MAIN(kCases)
