/* A bad address in a call is EFAULT, not a crash, and the stream goes on.  Linux checks before it
 * copies; whoever copies in user space has to find another way to the same answer. */
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>

#include "pair.h"

enum { kPage = 4096 };

static void* pages(size_t count, int protection) {
  void* at = mmap(NULL, count * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) fail("mmap");
  CHECKED(mprotect(at, count * kPage, protection));
  return at;
}
static void* bad_page(void) { return pages(1, PROT_NONE); }

/* The last `size` bytes before a page that can't be touched. */
static void* before_a_hole(size_t size) {
  char* at = pages(2, PROT_READ | PROT_WRITE);
  CHECKED(mprotect(at + kPage, kPage, PROT_NONE));
  return at + kPage - size;
}

/* A page of a file that has become shorter: SIGBUS. */
static void* beyond_the_end(void) {
  int fd = (int)CHECKED(memfd_create("short", 0));
  CHECKED(ftruncate(fd, kPage));
  void* at = mmap(NULL, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECKED(ftruncate(fd, 0));
  close(fd);
  return at;
}

static int pending(int fd) {
  int bytes = -1;
  CHECKED(ioctl(fd, FIONREAD, &bytes));
  return bytes;
}

static void bad_calls(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  void* bad = bad_page();
  show("send", send(fd, bad, 100, MSG_NOSIGNAL));
  show("write of NULL", write(fd, NULL, 100));
  struct iovec parts[2] = {{"abc", 3}, {bad, 100}};
  show("writev, second part bad", writev(fd, parts, 2));
  show("writev, parts bad", writev(fd, bad, 2));
  show("sendmsg", sendmsg(fd, bad, 0));
  tell(pair);
  await(pair);
  sleep_ms(20);
  show("recv", recv(fd, bad, 10, 0));
  show("read of NULL", read(fd, NULL, 10));
  char text[11] = "";
  show("recv of good", recv(fd, text, 10, 0));
  say("text: %s", text);
  show("poll", poll(bad, 1, 0));
  show("FIONREAD", ioctl(fd, FIONREAD, bad));
  ping_as_client(fd, 8);
}

static void good_peer(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  char text[8];
  sleep_ms(20);
  show("recv of what came", recv(pair->stream, text, sizeof(text), MSG_DONTWAIT));
  CHECKED(send(pair->stream, "0123456789", 10, 0));
  tell(pair);
  pong_as_server(pair->stream, 8);
}

/* Buffers of every kind, and the bytes stay where they are. */
static void bad_buffers(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  show("send, end bad", send(fd, before_a_hole(50), 100, MSG_NOSIGNAL));
  show("send, beyond a file", send(fd, beyond_the_end(), 100, MSG_NOSIGNAL));
  show("send, kernel's half", send(fd, (void*)(uintptr_t)0xffff800000000000, 100, MSG_NOSIGNAL));
  show("send, no address at all", send(fd, (void*)(uintptr_t)0x1234567812345678, 9, MSG_NOSIGNAL));
  show("send of nothing", send(fd, bad_page(), 0, MSG_NOSIGNAL));
  for (size_t n = 1; n <= 300; n += n < 20 ? 1 : 40) {
    if (send(fd, before_a_hole(n - 1), n, MSG_NOSIGNAL) != -1 || errno != EFAULT) {
      say("send of %zu: no EFAULT", n);
    }
  }
  tell(pair);
  await(pair);
  settle();
  say("pending: %d", pending(fd));
  show("recv, read-only", recv(fd, pages(1, PROT_READ), 10, 0));
  show("recv, end bad", recv(fd, before_a_hole(5), 10, 0));
  show("recv, beyond a file", recv(fd, beyond_the_end(), 10, 0));
  show("recv, peek", recv(fd, bad_page(), 10, MSG_PEEK));
  struct iovec parts[2] = {{before_a_hole(4), 4}, {bad_page(), 100}};
  show("readv, second part bad", readv(fd, parts, 2));
  show("recv, kernel's half", recv(fd, (void*)(uintptr_t)0xffff800000000000, 10, 0));
  say("pending: %d", pending(fd));
  show("recv, truncating", recv(fd, bad_page(), 3, MSG_TRUNC));
  show("recv, enough is good", recv(fd, before_a_hole(7), 100, 0));
  ping_as_client(fd, 8);
}

/* Nothing to copy, nothing to find: a call waits like any other first. */
static void* recv_into_bad(void* pair) {
  show("recv", recv(((struct Pair*)pair)->stream, bad_page(), 10, 0));
  return NULL;
}

static void bad_and_waiting(struct Pair* pair) {
  open_stream(pair);
  show("recv, nothing there", recv(pair->stream, bad_page(), 10, MSG_DONTWAIT));
  pthread_t thread;
  start_thread(&thread, recv_into_bad, pair);
  sleep_ms(100);
  say("it waits");
  tell(pair);
  join_thread(thread);
  char text[10];
  show("recv", recv(pair->stream, text, 10, MSG_WAITALL));
  ping_as_client(pair->stream, 8);
}

/* Of a large message what lies before the bad page may go. */
enum { kLarge = 1 << 20 };
static void large_to_the_hole(struct Pair* pair) {
  open_stream(pair);
  char* at = pages(kLarge / kPage + 1, PROT_READ | PROT_WRITE);
  fill_pattern(at, kLarge, 0);
  CHECKED(mprotect(at + kLarge, kPage, PROT_NONE));
  long n = send(pair->stream, at, kLarge + 1, MSG_NOSIGNAL);
  say("some went, not all: %d", n > 0 && n <= kLarge);
  show("the rest", send(pair->stream, at + n, kLarge - n, MSG_NOSIGNAL) == kLarge - n);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void read_to_the_hole(struct Pair* pair) {
  open_stream(pair);
  drain("drained", pair->stream);
}

/* Headers, lengths and addresses. */
static void bad_headers(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  void* bad = bad_page();
  tell(pair);
  await(pair);
  settle();
  struct iovec part = {(char[8]){0}, 2};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
  show("recvmsg", recvmsg(fd, bad, 0));
  message.msg_iov = bad;
  show("recvmsg, parts bad", recvmsg(fd, &message, 0));
  message.msg_iov = &part;
  struct msghdr* fixed = pages(1, PROT_READ | PROT_WRITE);
  *fixed = message;
  CHECKED(mprotect(fixed, kPage, PROT_READ));
  show("recvmsg, header read-only", recvmsg(fd, fixed, 0));
  say("pending: %d", pending(fd));
  char text[10];
  struct sockaddr_storage address;
  show("recvfrom, length bad", recvfrom(fd, text, 2, 0, (struct sockaddr*)&address, bad));
  socklen_t negative = (socklen_t)-1;
  show("recvfrom, length negative",
       recvfrom(fd, text, 1, 0, (struct sockaddr*)&address, &negative));
  socklen_t length = sizeof(address);
  show("recvfrom, address bad", recvfrom(fd, text, 1, 0, bad, &length));
  say("length: %u, pending: %d", length, pending(fd));
  show("recvmmsg", recvmmsg(fd, bad, 1, 0, NULL));
  struct mmsghdr one = {.msg_hdr = message};
  show("recvmmsg, limit bad", recvmmsg(fd, &one, 1, 0, bad));
  show("sendmmsg", sendmmsg(fd, bad, 1, 0));
  struct mmsghdr* two = before_a_hole(sizeof(*two));
  *two = one;
  two->msg_hdr.msg_iov = &(struct iovec){"x", 1};
  show("sendmmsg, second bad", sendmmsg(fd, two, 2, 0));
  say("pending: %d", pending(fd));
  int file = (int)CHECKED(memfd_create("file", 0));
  CHECKED(write(file, "abc", 3));
  show("sendfile, offset bad", sendfile(fd, file, bad, 3));
  off_t* start = pages(1, PROT_READ);
  show("sendfile, offset read-only", sendfile(fd, file, start, 3));
  int on = 1;
  show("setsockopt", setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, bad, sizeof(on)));
  length = sizeof(on);
  show("getsockopt", getsockopt(fd, SOL_SOCKET, SO_ERROR, bad, &length));
  show("getsockopt, length bad", getsockopt(fd, SOL_SOCKET, SO_ERROR, &on, bad));
  show("FIONBIO", ioctl(fd, FIONBIO, bad));
  show("connect", connect(fd, bad, 16));
  CHECKED(shutdown(fd, SHUT_WR));
  await(pair);
}

static void send_ten_and_drain(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  CHECKED(send(pair->stream, "0123456789", 10, 0));
  tell(pair);
  char text[8];
  long n, total = 0;
  while ((n = recv(pair->stream, text, sizeof(text), 0)) > 0) total += n;
  say("came: %ld", total);
  tell(pair);
}

/* Sets and arrays that have to be read before anybody knows whose descriptors are in them. */
static void bad_sets(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  void* bad = bad_page();
  tell(pair);
  await(pair);
  settle();
  struct pollfd* polls = before_a_hole(sizeof(*polls));
  *polls = (struct pollfd){fd, POLLIN, 0};
  show("poll, second bad", poll(polls, 2, 0));
  struct pollfd* fixed = pages(1, PROT_READ | PROT_WRITE);
  *fixed = *polls;
  CHECKED(mprotect(fixed, kPage, PROT_READ));
  show("poll, read-only", poll(fixed, 1, 1000));
  /* (libc's own functions read the limits.) */
  show("ppoll, limit bad", syscall(SYS_ppoll, polls, 1, bad, NULL, 8));
  show("ppoll, mask bad", ppoll(polls, 1, NULL, bad));
  show("poll of good", poll(polls, 1, 1000));
  show("select", select(fd + 1, bad, NULL, NULL, NULL));
  show("select, limit bad", syscall(SYS_select, fd + 1, NULL, NULL, NULL, bad));
  fd_set* set = pages(1, PROT_READ | PROT_WRITE);
  FD_SET(fd, set);
  struct timeval* limit = pages(1, PROT_READ | PROT_WRITE);
  limit->tv_sec = 1;
  CHECKED(mprotect(limit, kPage, PROT_READ));
  show("select, limit read-only", syscall(SYS_select, fd + 1, set, NULL, NULL, limit));
  CHECKED(mprotect(set, kPage, PROT_READ));
  show("select, set read-only", select(fd + 1, set, NULL, NULL, NULL));
  show("pselect, mask bad", pselect(fd + 1, set, NULL, NULL, NULL, bad));
  int instance = (int)CHECKED(epoll_create1(0));
  show("epoll_ctl", epoll_ctl(instance, EPOLL_CTL_ADD, fd, bad));
  struct epoll_event event = {.events = EPOLLIN, .data.u32 = 7};
  CHECKED(epoll_ctl(instance, EPOLL_CTL_ADD, fd, &event));
  show("epoll_wait", epoll_wait(instance, bad, 1, 1000));
  show("epoll_wait, second bad", epoll_wait(instance, before_a_hole(sizeof(event)), 2, 1000));
  show("epoll_pwait, mask bad", epoll_pwait(instance, &event, 1, 1000, bad));
  show("epoll_wait of good", epoll_wait(instance, &event, 1, 1000));
  char text[10];
  CHECKED(recv(fd, text, 10, MSG_WAITALL));
  show("epoll_wait, nothing there", epoll_wait(instance, bad, 1, 20));
  show("poll, nothing there", poll(fixed, 1, 20));
  ping_as_client(fd, 8);
}

/* A thread that blocks everything. */
static void* call_with_all_blocked(void* fd) {
  sigset_t all, now;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, NULL);
  for (int i = 0; i < 3; ++i) {
    show("send", send((int)(intptr_t)fd, bad_page(), 100, MSG_NOSIGNAL));
    show("recv", recv((int)(intptr_t)fd, bad_page(), 100, 0));
  }
  pthread_sigmask(SIG_SETMASK, NULL, &now);
  say("blocked: %d %d %d", sigismember(&now, SIGSEGV), sigismember(&now, SIGBUS),
      sigismember(&now, SIGALRM));
  return NULL;
}

static void all_blocked(struct Pair* pair) {
  open_stream(pair);
  tell(pair);
  await(pair);
  settle();
  pthread_t thread;
  start_thread(&thread, call_with_all_blocked, (void*)(intptr_t)pair->stream);
  join_thread(thread);
  char text[10];
  show("recv", recv(pair->stream, text, 10, MSG_WAITALL));
  ping_as_client(pair->stream, 8);
}

static const struct PairCase kCases[] = {
    {"efault", good_peer, bad_calls, true},
    {"buffers", good_peer, bad_buffers, true},
    {"waiting", good_peer, bad_and_waiting, true},
    {"large", read_to_the_hole, large_to_the_hole, true},
    {"headers", send_ten_and_drain, bad_headers, true},
    {"sets", good_peer, bad_sets, true},
    {"all_blocked", good_peer, all_blocked, true},
};
PAIR_MAIN(kCases)
