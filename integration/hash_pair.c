/* Client and server that move pseudo-random bytes in many ways and account for each of them.
 *
 *   hash_pair server|client [seed=N] [family=4|6] [shape=SHAPE] [io=IO] [total=BYTES] [streams=N] [pause=MS]
 *
 * SHAPE: one_way (client sends), server_first (server sends), both (at once), exchange (messages in
 * turn), half_close (client sends and shuts, server drains and answers).
 * IO: blocking (`both` then takes a reader and a writer thread on one stream), poll, select,
 * epoll_lt, epoll_et.  Every stream has a thread of its own.
 *
 * Sizes (1 B to 8 MiB), the calls used and the pauses follow from the seed, so that a failure can
 * be run again.  Byte i of a direction is known to both ends: the first wrong one is named, with
 * the offset where its neighbourhood belongs.  Each end prints `sent S D: bytes crc` and `received
 * S D: bytes crc`; run_case compares them across the pair.  hash_pair.py speaks the same protocol.
 */
#include "known_bytes.h"
#include "pair.h"

enum Io { kBlocking, kPoll, kSelect, kEpollLt, kEpollEt };
enum Shape { kOneWay, kServerFirst, kBoth, kExchange, kHalfClose };

struct Options {
  uint64_t seed, total;
  int family, streams, pause_ms;
  enum Io io;
  enum Shape shape;
};

static struct Options options = {1, 24 << 20, 4, 1, 80, kBlocking, kBoth};
static bool server_role;

/* ---- one direction of one stream ---- */

struct Direction {
  int stream;
  bool from_server;
  uint64_t total, done;
  uint64_t random; /* sizes and calls */
  uint32_t crc;
  size_t message_left; /* sender: of the message begun */
  bool paused, ended;  /* receiver: ended = EOF was seen */
  uint8_t* buffer;     /* receiver */
};

static const uint8_t* expected_at(const struct Direction* d, uint64_t offset) {
  uint64_t shift = (uint64_t)d->stream * 7919 + (d->from_server ? 524287 : 0);
  return known_bytes_at(offset + shift);
}

static void begin(struct Direction* d, int stream, bool from_server, uint64_t total) {
  memset(d, 0, sizeof(*d));
  d->stream = stream;
  d->from_server = from_server;
  d->total = total;
  d->random = options.seed * 1000003 + (uint64_t)stream * 17 + from_server * 5 + server_role;
  d->buffer = malloc(kLargest);
}

static void finish(struct Direction* d, bool sender) {
  if (d->done != d->total) {
    fail("stream %d: %s %llu of %llu bytes", d->stream, sender ? "sent" : "received",
         (unsigned long long)d->done, (unsigned long long)d->total);
  }
  say("%s %d %s: %llu %08x", sender ? "sent" : "received", d->stream,
      d->from_server ? "from_server" : "from_client", (unsigned long long)d->done, d->crc);
  free(d->buffer);
}

static _Noreturn void name_damage(const struct Direction* d, const uint8_t* data, size_t size) {
  const uint8_t* wanted = expected_at(d, d->done);
  size_t at = 0;
  while (data[at] == wanted[at]) ++at;
  size_t sample = size - at < 16 ? size - at : 16;
  const uint8_t* found = memmem(known_bytes_at(0), kTile + 16, data + at, sample);
  uint64_t wrong = d->done + at;
  if (found == NULL || sample < 8)
    fail("stream %d: wrong byte at offset %llu (seed %llu)", d->stream, (unsigned long long)wrong,
         (unsigned long long)options.seed);
  long long distance = (found - expected_at(d, wrong));
  fail("stream %d: at offset %llu come the bytes of %+lld (modulo %d), seed %llu", d->stream,
       (unsigned long long)wrong, distance, kTile, (unsigned long long)options.seed);
}

/* One call that sends; result as of send(). */
static ssize_t send_some(int fd, struct Direction* d) {
  if (!d->paused && d->done > d->total / 8) {
    d->paused = true; /* time for the lift, in the middle of the data */
    sleep_ms(options.pause_ms);
  }
  if (below(&d->random, 64) == 0) sleep_ms(1);
  if (d->message_left == 0) {
    d->message_left = random_size(&d->random, kLargest);
    if (d->message_left > d->total - d->done) d->message_left = d->total - d->done;
  }
  const uint8_t* data = expected_at(d, d->done);
  size_t half = d->message_left / 3;
  struct iovec parts[3] = {
      {(void*)data, half}, {NULL, 0}, {(void*)(data + half), d->message_left - half}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
  ssize_t n;
  switch (below(&d->random, 4)) {
    case 0:
      n = write(fd, data, d->message_left);
      break;
    case 1:
      n = writev(fd, parts, 3);
      break;
    case 2:
      n = sendmsg(fd, &message, MSG_NOSIGNAL);
      break;
    default:
      n = send(fd, data, d->message_left, MSG_NOSIGNAL);
      break;
  }
  if (n > 0) {
    if ((size_t)n > d->message_left) fail("a call sent more than it was given");
    d->crc = crc_of(d->crc, data, (size_t)n);
    d->done += (uint64_t)n;
    d->message_left -= (size_t)n;
  }
  return n;
}

/* One call that receives, no more than `limit` bytes; result as of recv(). */
static ssize_t receive_some(int fd, struct Direction* d, size_t limit) {
  size_t size = random_size(&d->random, 1 << 20);
  if (size > limit) size = limit;
  if (below(&d->random, 64) == 0) sleep_ms(1);
  size_t part = size / 2;
  struct iovec parts[2] = {{d->buffer, part}, {d->buffer + part, size - part}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
  ssize_t n;
  switch (below(&d->random, 6)) {
    case 0:
      n = read(fd, d->buffer, size);
      break;
    case 1:
      n = readv(fd, parts, 2);
      break;
    case 2:
      n = recvmsg(fd, &message, 0);
      break;
    case 3:
      n = recv(fd, d->buffer, size, MSG_PEEK);
      if (n > 0 && memcmp(d->buffer, expected_at(d, d->done), (size_t)n) != 0) {
        name_damage(d, d->buffer, (size_t)n);
      }
      if (n > 0) n = recv(fd, d->buffer, (size_t)n, MSG_WAITALL);
      break;
    default:
      n = recv(fd, d->buffer, size, 0);
      break;
  }
  if (n > 0) {
    if (memcmp(d->buffer, expected_at(d, d->done), (size_t)n) != 0) {
      name_damage(d, d->buffer, (size_t)n);
    }
    d->crc = crc_of(d->crc, d->buffer, (size_t)n);
    d->done += (uint64_t)n;
  }
  return n;
}

struct Blocking {
  int fd;
  struct Direction* direction;
};

static void send_blocking(int fd, struct Direction* d) {
  while (d->done < d->total) {
    if (send_some(fd, d) <= 0) fail("send: %s", strerrorname_np(errno));
  }
}

static void receive_blocking(int fd, struct Direction* d) {
  while (d->done < d->total) {
    ssize_t n = receive_some(fd, d, d->total - d->done);
    if (n <= 0)
      fail("recv: %zd %s after %llu", n, strerrorname_np(errno), (unsigned long long)d->done);
  }
}

static void* send_in_thread(void* argument) {
  struct Blocking* work = argument;
  send_blocking(work->fd, work->direction);
  return NULL;
}

static void move_blocking(int fd, struct Direction* out, struct Direction* in) {
  if (out == NULL || in == NULL) {
    if (out != NULL) send_blocking(fd, out);
    if (in != NULL) receive_blocking(fd, in);
    return;
  }
  pthread_t writer;
  struct Blocking work = {fd, out};
  start_thread(&writer, send_in_thread, &work);
  receive_blocking(fd, in);
  join_thread(writer);
}

struct Waiter {
  int fd, epoll;
  uint32_t interest;
};

static void set_interest(struct Waiter* w, bool reading, bool writing) {
  uint32_t interest = (reading ? EPOLLIN : 0u) | (writing ? EPOLLOUT : 0u);
  if (options.io == kEpollEt) interest = EPOLLIN | EPOLLOUT | EPOLLET;
  if (interest == w->interest) return;
  struct epoll_event event = {.events = interest};
  if (w->epoll >= 0) {
    CHECKED(epoll_ctl(w->epoll, w->interest == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, w->fd, &event));
  }
  w->interest = interest;
}

/* Waits as the options say; 20 s without readiness is a lost wake-up. */
static void wait_ready(struct Waiter* w, bool reading, bool writing) {
  set_interest(w, reading, writing);
  int ready;
  if (options.io == kPoll) {
    struct pollfd one = {w->fd, (short)((reading ? POLLIN : 0) | (writing ? POLLOUT : 0)), 0};
    ready = poll(&one, 1, 20000);
  } else if (options.io == kSelect) {
    fd_set in, out;
    FD_ZERO(&in);
    FD_ZERO(&out);
    if (reading) FD_SET(w->fd, &in);
    if (writing) FD_SET(w->fd, &out);
    ready = select(w->fd + 1, &in, &out, NULL, &(struct timeval){20, 0});
  } else {
    struct epoll_event events[4];
    ready = epoll_wait(w->epoll, events, 4, 20000);
  }
  if (ready <= 0)
    fail("wait for %s%s: %d %s", reading ? "in" : "", writing ? "out" : "", ready,
         strerrorname_np(errno));
}

/* Moves until EAGAIN in each direction, then waits: right for level and for edge. */
static void move_nonblocking(struct Waiter* w, struct Direction* out, struct Direction* in) {
  for (;;) {
    bool blocked_out = false, blocked_in = false;
    for (int burst = 0; out != NULL && out->done < out->total && !blocked_out && burst < 8;
         ++burst) {
      ssize_t n = send_some(w->fd, out);
      blocked_out = n < 0 && errno == EAGAIN;
      if (n < 0 && !blocked_out) fail("send: %s", strerrorname_np(errno));
    }
    for (int burst = 0; in != NULL && in->done < in->total && !blocked_in && burst < 8; ++burst) {
      ssize_t n = receive_some(w->fd, in, in->total - in->done);
      blocked_in = n < 0 && errno == EAGAIN;
      if (n == 0 || (n < 0 && !blocked_in)) fail("recv: %zd %s", n, strerrorname_np(errno));
    }
    bool writing = out != NULL && out->done < out->total;
    bool reading = in != NULL && in->done < in->total;
    if (!writing && !reading) return;
    if ((!writing || blocked_out) && (!reading || blocked_in)) wait_ready(w, reading, writing);
  }
}

static void move(struct Waiter* w, struct Direction* out, struct Direction* in) {
  if (options.io == kBlocking) {
    move_blocking(w->fd, out, in);
  } else {
    move_nonblocking(w, out, in);
  }
}

static void expect_end(struct Waiter* w) {
  char byte;
  ssize_t n;
  /* Tried before it is waited for: the edge may have come with the last data. */
  while ((n = recv(w->fd, &byte, 1, 0)) < 0 && errno == EAGAIN) wait_ready(w, true, false);
  if (n != 0) fail("instead of the end: %zd %s", n, n < 0 ? strerrorname_np(errno) : "more data");
}

/* Messages in turn, sizes known to both ends; the client begins. */
static void exchange(struct Waiter* w, struct Direction* out, struct Direction* in) {
  uint64_t sizes = options.seed + (uint64_t)out->stream;
  uint64_t out_total = out->total, in_total = in->total;
  for (bool from_server = false; out->done < out_total || in->done < in_total;
       from_server = !from_server) {
    struct Direction* d = from_server == out->from_server ? out : in;
    uint64_t total = d == out ? out_total : in_total;
    size_t size = random_size(&sizes, kLargest / 8);
    d->total = d->done + size < total ? d->done + size : total;
    move(w, d == out ? out : NULL, d == out ? NULL : in);
  }
}

static void run_shape(struct Waiter* w, struct Direction* out, struct Direction* in) {
  bool first = options.shape == kServerFirst ? server_role : !server_role;
  switch (options.shape) {
    case kBoth:
      move(w, out, in);
      break;
    case kExchange:
      exchange(w, out, in);
      break;
    case kOneWay:
    case kServerFirst:
      move(w, first ? out : NULL, first ? NULL : in);
      break;
    case kHalfClose:
      move(w, first ? out : NULL, first ? NULL : in);
      if (first) {
        CHECKED(shutdown(w->fd, SHUT_WR));
      } else {
        expect_end(w);
      }
      move(w, first ? NULL : out, first ? in : NULL);
      break;
  }
}

struct Job {
  int stream, fd;
};

static void* run_stream(void* argument) {
  struct Job* job = argument;
  struct Waiter waiter = {job->fd, -1, 0};
  if (options.io != kBlocking) CHECKED(fcntl(job->fd, F_SETFL, O_NONBLOCK));
  if (options.io >= kEpollLt) waiter.epoll = (int)CHECKED(epoll_create1(EPOLL_CLOEXEC));
  bool client_sends = options.shape != kServerFirst, server_sends = options.shape != kOneWay;
  struct Direction out, in;
  begin(&out, job->stream, server_role,
        (server_role ? server_sends : client_sends) ? options.total : 0);
  begin(&in, job->stream, !server_role,
        (server_role ? client_sends : server_sends) ? options.total : 0);
  run_shape(&waiter, &out, &in);
  bool shut = options.shape == kHalfClose && !server_role;
  if (!shut) CHECKED(shutdown(job->fd, SHUT_WR));
  bool saw_end = options.shape == kHalfClose && server_role;
  if (!saw_end) expect_end(&waiter);
  finish(&out, true);
  finish(&in, false);
  CHECKED(close(job->fd));
  if (waiter.epoll >= 0) CHECKED(close(waiter.epoll));
  return NULL;
}

static int index_of(const char* name, const char* const* names) {
  for (int i = 0; names[i] != NULL; ++i) {
    if (strcmp(names[i], name) == 0) return i;
  }
  fail("unknown value %s", name);
}

static void read_options(int argc, char** argv) {
  static const char* const kKeys[] = {"seed", "total", "family", "streams", "io", "shape", "pause", NULL};
  static const char* const kIos[] = {"blocking", "poll", "select", "epoll_lt", "epoll_et", NULL};
  static const char* const kShapes[] = {"one_way",  "server_first", "both",
                                        "exchange", "half_close",   NULL};
  for (int i = 2; i < argc; ++i) {
    char* value = strchr(argv[i], '=');
    if (value == NULL) fail("%s is no KEY=VALUE", argv[i]);
    *value++ = '\0';
    uint64_t number = strtoull(value, NULL, 10);
    switch (index_of(argv[i], kKeys)) {
      case 0:
        options.seed = number;
        break;
      case 1:
        options.total = number;
        break;
      case 2:
        options.family = (int)number;
        break;
      case 3:
        options.streams = (int)number;
        break;
      case 4:
        options.io = (enum Io)index_of(value, kIos);
        break;
      case 5:
        options.shape = (enum Shape)index_of(value, kShapes);
        break;
      case 6:
        options.pause_ms = (int)number;
        break;
    }
  }
  if (options.streams < 1 || options.streams > 64) fail("1 to 64 streams");
}

int main(int argc, char** argv) {
  const char* control = getenv("PAIR_CONTROL_FD");
  if (argc < 2 || (control == NULL && getenv("PAIR_HOST") == NULL)) {
    fprintf(stderr, "usage: hash_pair server|client KEY=VALUE... (started by run_case)\n");
    return 2;
  }
  server_role = strcmp(argv[1], "server") == 0;
  read_options(argc, argv);
  make_known_bytes(options.seed);
  struct Pair pair = {.control = control != NULL ? atoi(control) : -1, .listener = -1, .stream = -1};
  if (server_role) {
    listen_on_loopback(&pair, options.family == 6 ? AF_INET6 : AF_INET, 64);
  } else {
    learn_address(&pair);
  }
  struct Job jobs[64];
  pthread_t threads[64];
  for (int i = 0; i < options.streams; ++i) { /* one after another: both ends count alike */
    jobs[i].stream = i;
    jobs[i].fd =
        server_role ? (int)CHECKED(accept(pair.listener, NULL, NULL)) : connect_to_server(&pair);
  }
  for (int i = 0; i < options.streams; ++i) start_thread(&threads[i], run_stream, &jobs[i]);
  for (int i = 0; i < options.streams; ++i) join_thread(threads[i]);
  return 0;
}
