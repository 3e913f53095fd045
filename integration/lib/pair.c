#include "pair.h"

#include <arpa/inet.h>
#include <stdarg.h>
#include <time.h>

#include "tcp_bytes.h"

volatile sig_atomic_t signals_seen;

/* ---- output ---- */

static void put_line(const char* format, va_list arguments) {
  char line[512];
  int size = vsnprintf(line, sizeof(line) - 1, format, arguments);
  if (size < 0) return;
  if ((size_t)size > sizeof(line) - 2) size = sizeof(line) - 2;
  line[size] = '\n';
  /* One write per line: a process that is killed afterwards has still said it. */
  if (write(STDOUT_FILENO, line, size + 1) < 0) _exit(98);
}

void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  put_line(format, arguments);
  va_end(arguments);
}

void fail(const char* format, ...) {
  char why[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(why, sizeof(why), format, arguments);
  va_end(arguments);
  say("FAILED %s", why);
  _exit(99);
}

static const char* errno_name(int error) {
  const char* name = strerrorname_np(error);
  return name != NULL ? name : "unknown errno";
}

void show(const char* label, long result) {
  int error = errno;
  if (result < 0) {
    say("%s: %ld %s", label, result, errno_name(error));
  } else {
    say("%s: %ld", label, result);
  }
  errno = error;
}

struct FlagName {
  uint32_t flag;
  const char* name;
};

static void show_flags(const char* label, uint32_t value, const struct FlagName* names) {
  char text[200] = "";
  for (; names->name != NULL; ++names) {
    if (!(value & names->flag)) continue;
    if (text[0] != '\0') strcat(text, "|");
    strcat(text, names->name);
    value &= ~names->flag;
  }
  if (value != 0) snprintf(text + strlen(text), 20, "|0x%x", value);
  say("%s: %s", label, text[0] != '\0' ? text : "nothing");
}

void show_events(const char* label, short revents) {
  static const struct FlagName kNames[] = {
      {POLLIN, "IN"},   {POLLPRI, "PRI"},   {POLLOUT, "OUT"},     {POLLERR, "ERR"},
      {POLLHUP, "HUP"}, {POLLNVAL, "NVAL"}, {POLLRDHUP, "RDHUP"}, {0, NULL}};
  show_flags(label, (uint16_t)revents, kNames);
}

void show_epoll(const char* label, uint32_t events) {
  static const struct FlagName kNames[] = {
      {EPOLLIN, "IN"},   {EPOLLPRI, "PRI"},     {EPOLLOUT, "OUT"}, {EPOLLERR, "ERR"},
      {EPOLLHUP, "HUP"}, {EPOLLRDHUP, "RDHUP"}, {0, NULL}};
  show_flags(label, events, kNames);
}

void measure(const char* label, double value, double slack) {
  say("~ %s %.1f %.1f", label, value, slack);
}

long checked(long result, const char* what, int line) {
  if (result < 0) fail("line %d: %s: %s", line, what, errno_name(errno));
  return result;
}

/* ---- turns ---- */

void tell(struct Pair* pair) {
  if (send(pair->control, "t", 1, MSG_NOSIGNAL) != 1) fail("tell: %s", errno_name(errno));
}

void await(struct Pair* pair) {
  char turn;
  ssize_t got;
  do {
    got = recv(pair->control, &turn, 1, 0);
  } while (got < 0 && errno == EINTR);
  if (got != 1) fail("await: the other role is gone");
}

/* ---- the stream ---- */

/* What the environment says of this family's address; whether it says anything. */
static bool address_from_environment(struct Pair* pair, int family) {
  const char* host = getenv(family == AF_INET6 ? "PAIR_HOST6" : "PAIR_HOST");
  struct sockaddr_in* v4 = (struct sockaddr_in*)&pair->address;
  if (host == NULL) return false;
  memset(&pair->address, 0, sizeof(pair->address));
  if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    pair->address_size = sizeof(*v4);
    return true;
  }
  if (inet_pton(AF_INET6, host, &pair->address.sin6_addr) != 1) fail("the host is %s", host);
  pair->address.sin6_family = AF_INET6;
  pair->address_size = sizeof(pair->address);
  return true;
}

/* The same place in both families. */
static void set_port(struct Pair* pair, const char* port) {
  if (port != NULL) pair->address.sin6_port = htons((uint16_t)atoi(port));
}

int listen_on_loopback(struct Pair* pair, int family, int backlog) {
  if (address_from_environment(pair, family)) {
  } else if (family == AF_INET6) {
    pair->address = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
    pair->address_size = sizeof(struct sockaddr_in6);
  } else {
    struct sockaddr_in* v4 = (struct sockaddr_in*)&pair->address;
    memset(&pair->address, 0, sizeof(pair->address));
    v4->sin_family = AF_INET;
    v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    pair->address_size = sizeof(*v4);
  }
  set_port(pair, getenv("PAIR_PORT")); /* for drivers that watch one port from outside */
  struct sockaddr* address = (struct sockaddr*)&pair->address;
  int fd = (int)CHECKED(socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECKED(bind(fd, address, pair->address_size));
  CHECKED(listen(fd, backlog));
  CHECKED(getsockname(fd, address, &pair->address_size));
  pair->listener = fd;
  if (pair->control >= 0 &&
      send(pair->control, address, pair->address_size, MSG_NOSIGNAL) != (ssize_t)pair->address_size)
    fail("send address");
  return fd;
}

void learn_address(struct Pair* pair) {
  if (pair->control < 0) { /* on two hosts: both are told */
    if (!address_from_environment(pair, AF_INET) || getenv("PAIR_PORT") == NULL) {
      fail("neither a control channel nor PAIR_HOST and PAIR_PORT");
    }
    set_port(pair, getenv("PAIR_PORT"));
    return;
  }
  ssize_t size = recv(pair->control, &pair->address, sizeof(pair->address), 0);
  if (size < (ssize_t)sizeof(struct sockaddr_in)) fail("no address from the server");
  pair->address_size = (socklen_t)size;
}

int connect_to_server(struct Pair* pair) {
  int fd = (int)CHECKED(
      socket(((struct sockaddr*)&pair->address)->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECKED(connect(fd, (struct sockaddr*)&pair->address, pair->address_size));
  return fd;
}

/* Set once by pair_main before any case runs. */
static bool is_server;
static int lift_within_ms; /* the case is about lifted streams, and both ends have the shim; else 0 */

void open_cold_stream(struct Pair* pair) {
  if (is_server) {
    if (pair->listener < 0) listen_on_loopback(pair, AF_INET, 64);
    pair->stream = (int)CHECKED(accept4(pair->listener, NULL, NULL, SOCK_CLOEXEC));
  } else {
    if (pair->address_size == 0) learn_address(pair);
    pair->stream = connect_to_server(pair);
  }
}

void open_stream(struct Pair* pair) {
  open_cold_stream(pair);
  if (is_server) {
    warm_up_as_server(pair->stream);
  } else {
    warm_up_as_client(pair->stream);
  }
}

static void receive_exactly(int fd, void* to, size_t size) {
  for (size_t got = 0; got < size;) {
    ssize_t n = recv(fd, (char*)to + got, size - got, 0);
    if (n <= 0) fail("receive_exactly: %zd %s after %zu of %zu", n, errno_name(errno), got, size);
    got += (size_t)n;
  }
}

static void send_exactly(int fd, const void* from, size_t size) {
  for (size_t done = 0; done < size;) {
    ssize_t n = send(fd, (const char*)from + done, size - done, MSG_NOSIGNAL);
    if (n <= 0) fail("send_exactly: %zd %s after %zu of %zu", n, errno_name(errno), done, size);
    done += (size_t)n;
  }
}

void ping_as_client(int fd, int rounds) {
  uint8_t out[kWarmUpBytes], in[kWarmUpBytes];
  for (int i = 0; i < rounds; ++i) {
    fill_pattern(out, sizeof(out), (uint64_t)i);
    send_exactly(fd, out, sizeof(out));
    receive_exactly(fd, in, sizeof(in));
    if (memcmp(in, out, sizeof(in)) != 0) fail("echo %d differs", i);
  }
}

void pong_as_server(int fd, int rounds) {
  uint8_t buffer[kWarmUpBytes];
  for (int i = 0; i < rounds; ++i) {
    receive_exactly(fd, buffer, sizeof(buffer));
    send_exactly(fd, buffer, sizeof(buffer));
  }
}

/* Blocks whose first byte says whether another one follows. */
static void send_block(int fd, bool last) {
  uint8_t block[kWarmUpBytes];
  fill_pattern(block, sizeof(block), 0);
  block[0] = last;
  send_exactly(fd, block, sizeof(block));
}

static bool receive_block(int fd) {
  uint8_t block[kWarmUpBytes];
  receive_exactly(fd, block, sizeof(block));
  return block[0];
}

/* Until TCP stands still: the bytes go another way. A lift is made beside the program, as soon as the
 * machine finds the time; only then is there something to test. */
static void until_lifted(int fd, bool echoed) {
  bool over = lift_within_ms == 0;
  /* Where one end looks for a peer it looks now, too; without the shim nothing happens. */
  if (over && getenv("LD_PRELOAD") != NULL) sleep_ms(kSettleMs);
  for (int64_t start = now_ns();; sleep_ms(1)) {
    uint64_t before = tcp_bytes(fd);
    send_block(fd, over);
    if (echoed) receive_block(fd);
    if (over) return;
    over = tcp_bytes(fd) == before || ms_since(start) > lift_within_ms;
  }
}

void send_until_lifted(int fd) { until_lifted(fd, false); }

void ping_until_lifted(int fd) { until_lifted(fd, true); }

void receive_until_lifted(int fd) {
  while (!receive_block(fd)) {
  }
}

void pong_until_lifted(int fd) {
  bool last;
  do {
    last = receive_block(fd);
    send_block(fd, last);
  } while (!last);
}

void learn_lift_limit(void) {
  const char* within = getenv("PAIR_LIFT_MS");
  lift_within_ms = within != NULL ? atoi(within) : 0;
}

int lift_limit_ms(void) { return lift_within_ms; }

uint64_t tcp_carried(int fd) { return tcp_bytes(fd); }

void show_lifted(const char* label, int fd, uint64_t carried) {
  say("%s: %s", label, lift_within_ms == 0 || tcp_bytes(fd) == carried ? "where it belongs" : "SET DOWN");
}

bool not_lifted_yet(struct Pair* pair) {
  static uint64_t before;
  static int64_t start;
  uint64_t now = tcp_bytes(pair->stream);
  if (start == 0) start = now_ns();
  char mine = now != before && ms_since(start) < lift_within_ms, theirs;
  before = now;
  if (send(pair->control, &mine, 1, MSG_NOSIGNAL) != 1 || recv(pair->control, &theirs, 1, 0) != 1) {
    fail("not_lifted_yet: the other role is gone");
  }
  return mine || theirs;
}

void warm_up_as_client(int fd) {
  ping_as_client(fd, kWarmUpRounds);
  until_lifted(fd, true);
  ping_as_client(fd, kAfterLiftRounds);
}

void warm_up_as_server(int fd) {
  pong_as_server(fd, kWarmUpRounds);
  pong_until_lifted(fd);
  pong_as_server(fd, kAfterLiftRounds);
}

/* ---- data ---- */

uint8_t pattern_at(uint64_t offset) {
  uint64_t x = (offset + 1) * 0x9e3779b97f4a7c15u;
  return (uint8_t)(x >> 56) ^ (uint8_t)(x >> 24);
}

void fill_pattern(void* to, size_t size, uint64_t offset) {
  for (size_t i = 0; i < size; ++i) ((uint8_t*)to)[i] = pattern_at(offset + i);
}

bool pattern_holds(const void* from, size_t size, uint64_t offset) {
  for (size_t i = 0; i < size; ++i) {
    if (((const uint8_t*)from)[i] != pattern_at(offset + i)) return false;
  }
  return true;
}

enum { kChunk = 65536 };

void send_pattern(int fd, size_t size, uint64_t offset) {
  static _Thread_local uint8_t buffer[kChunk];
  for (size_t done = 0; done < size;) {
    size_t n = size - done < kChunk ? size - done : kChunk;
    fill_pattern(buffer, n, offset + done);
    send_exactly(fd, buffer, n);
    done += n;
  }
}

void receive_pattern(int fd, size_t size, uint64_t offset) {
  static _Thread_local uint8_t buffer[kChunk];
  for (size_t done = 0; done < size;) {
    size_t n = size - done < kChunk ? size - done : kChunk;
    receive_exactly(fd, buffer, n);
    if (!pattern_holds(buffer, n, offset + done)) fail("pattern broken near %zu", done);
    done += n;
  }
}

void drain(const char* label, int fd) {
  static _Thread_local uint8_t buffer[kChunk];
  uint64_t total = 0;
  bool intact = true;
  ssize_t n;
  while ((n = recv(fd, buffer, sizeof(buffer), 0)) > 0) {
    intact = intact && pattern_holds(buffer, (size_t)n, total);
    total += (uint64_t)n;
  }
  say("%s: %llu bytes, %s, then %s", label, (unsigned long long)total,
      intact ? "intact" : "DAMAGED", n == 0 ? "EOF" : errno_name(errno));
}

void fill_until_full(int fd) {
  static _Thread_local uint8_t buffer[kChunk];
  /* Full means full for a while: over TCP the peer's window can still open a little later. */
  int quiet = 0;
  for (int pass = 0; pass < 40 && quiet < 3; ++pass) {
    ssize_t sent = send(fd, buffer, sizeof(buffer), MSG_DONTWAIT | MSG_NOSIGNAL);
    quiet = sent > 0 ? 0 : quiet + 1;
    while (sent > 0) sent = send(fd, buffer, sizeof(buffer), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (errno != EAGAIN) fail("fill_until_full: %s", errno_name(errno));
    settle();
  }
}

/* ---- descriptors ---- */

void send_fd(int channel, int fd) {
  char data = 'f';
  struct iovec part = {&data, 1};
  union {
    char space[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
  } control;
  memset(&control, 0, sizeof(control));
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
  struct cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  CHECKED(sendmsg(channel, &message, 0));
}

int receive_fd(int channel) {
  char data;
  struct iovec part = {&data, 1};
  union {
    char space[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
  } control;
  struct msghdr message = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
  if (recvmsg(channel, &message, MSG_CMSG_CLOEXEC) != 1) fail("no descriptor came");
  int fd;
  memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
  return fd;
}

/* ---- time, threads, signals ---- */

int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

double ms_since(int64_t start_ns) { return (double)(now_ns() - start_ns) / 1e6; }

void settle(void) { sleep_ms(120); }

void sleep_ms(int ms) {
  struct timespec left = {ms / 1000, (ms % 1000) * 1000000L};
  while (nanosleep(&left, &left) < 0 && errno == EINTR) {
  }
}

void start_thread(pthread_t* thread, void* (*body)(void*), void* argument) {
  int error = pthread_create(thread, NULL, body, argument);
  if (error != 0) fail("pthread_create: %s", errno_name(error));
}

void join_thread(pthread_t thread) { pthread_join(thread, NULL); }

static char state_of(pid_t thread_id) {
  char path[64], text[256];
  snprintf(path, sizeof(path), "/proc/self/task/%d/stat", thread_id);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t size = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
  if (fd >= 0) close(fd);
  if (size <= 0) fail("no thread %d", thread_id);
  text[size] = '\0';
  char* name_end = strrchr(text, ')');
  return name_end != NULL && name_end[1] == ' ' ? name_end[2] : '?';
}

void wait_until_asleep(pid_t thread_id) {
  int asleep = 0;
  /* Seen several times in a row, so that a thread that only waits for a lock or a page passes by.
   */
  for (int i = 0; i < 1000 && asleep < 5; ++i) {
    sleep_ms(5);
    asleep = state_of(thread_id) == 'S' ? asleep + 1 : 0;
  }
}

static void on_signal(int signal_number) {
  (void)signal_number;
  ++signals_seen;
}

void count_signal(int signal_number, int flags) {
  struct sigaction action;
  memset(&action, 0, sizeof(action));
  action.sa_handler = on_signal;
  action.sa_flags = flags;
  CHECKED(sigaction(signal_number, &action, NULL));
}

/* ---- echoes ---- */

enum { kEchoPending = 20000, kEchoTotal = 400000 };

static void* send_the_rest(void* argument) {
  struct Pair* pair = argument;
  sleep_ms(50);
  send_pattern(pair->stream, kEchoTotal - kEchoPending, kEchoPending);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  return NULL;
}

void be_echoed(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, kEchoPending, 0);
  await(pair);
  sleep_ms(20);
  tell(pair);
  pthread_t thread;
  start_thread(&thread, send_the_rest, pair);
  receive_pattern(pair->stream, kEchoTotal - 1000, 1000);
  say("echo intact");
  join_thread(thread);
  show("end", recv(pair->stream, &(char){0}, 1, 0));
}

void* echo_in_thread(void* argument) {
  int fd = (int)(intptr_t)argument;
  uint8_t buffer[kWarmUpBytes];
  ssize_t got;
  while ((got = recv(fd, buffer, sizeof(buffer), 0)) > 0) {
    for (ssize_t done = 0; done < got;) {
      done += CHECKED(send(fd, buffer + done, (size_t)(got - done), MSG_NOSIGNAL));
    }
  }
  CHECKED(close(fd));
  return NULL;
}

/* ---- main ---- */

static void meet(struct Pair* pair) {
  pid_t self = getpid();
  if (send(pair->control, &self, sizeof(self), MSG_NOSIGNAL) != sizeof(self)) fail("meet: send");
  if (recv(pair->control, &pair->peer, sizeof(pair->peer), 0) != sizeof(pair->peer)) {
    fail("meet: the other role did not start");
  }
}

int pair_main(int argc, char** argv, const struct PairCase* cases, size_t count) {
  if (argc == 2 && strcmp(argv[1], "list") == 0) {
    for (size_t i = 0; i < count; ++i) {
      printf("%s%s%s%s\n", cases[i].variant, cases[i].lifts ? " lifts" : "",
             cases[i].execs ? " execs" : "", cases[i].alone ? " alone" : "");
    }
    return 0;
  }
  const char* control = getenv("PAIR_CONTROL_FD");
  if (argc < 3 || control == NULL) {
    fprintf(stderr, "usage: %s list | server VARIANT | client VARIANT (started by run_case)\n",
            argv[0]);
    return 2;
  }
  is_server = strcmp(argv[1], "server") == 0;
  struct Pair pair = {.control = atoi(control), .listener = -1, .stream = -1};
  CHECKED(fcntl(pair.control, F_SETFD, FD_CLOEXEC));
  for (size_t i = 0; i < count; ++i) {
    if (strcmp(cases[i].variant, argv[2]) != 0) continue;
    pair.variant = cases[i].variant;
    const char* within = getenv("PAIR_LIFT_MS");
    lift_within_ms = cases[i].lifts && within != NULL ? atoi(within) : 0;
    meet(&pair);
    (is_server ? cases[i].server : cases[i].client)(&pair);
    return 0;
  }
  fprintf(stderr, "%s: no variant %s\n", argv[0], argv[2]);
  return 2;
}
