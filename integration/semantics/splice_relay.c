/* A relay that moves bytes from a stream through a pipe and back by splice, as haproxy does: no byte is
 * lost, whatever has no room, and each call ends as on TCP. */
#include "pair.h"

enum { kTotal = 6 << 20, kPiece = 100000 };

static bool has(const struct Pair* pair, const char* word) { return strstr(pair->variant, word) != NULL; }

static void wait_for(int fd, short events) {
  struct pollfd one = {fd, events, 0};
  CHECKED(poll(&one, 1, -1));
}

/* All that comes, back to where it came from. */
static void relay(struct Pair* pair, int in, int out, unsigned flags) {
  int fd = pair->stream;
  uint64_t from = 0, to = 0;
  while (to < kTotal) {
    if (from == to) {
      ssize_t n = splice(fd, NULL, in, NULL, kPiece, flags);
      if (n < 0 && errno == EAGAIN) {
        wait_for(fd, POLLIN);
        continue;
      }
      if (n <= 0) fail("splice from the stream: %zd %s", n, strerrorname_np(errno));
      from += (uint64_t)n;
    }
    ssize_t n = splice(out, NULL, fd, NULL, from - to, flags | SPLICE_F_MORE);
    if (n < 0 && errno == EAGAIN) {
      wait_for(fd, POLLOUT);
      continue;
    }
    if (n <= 0) fail("splice to the stream: %zd %s", n, strerrorname_np(errno));
    to += (uint64_t)n;
  }
}

static void edges(struct Pair* pair, int in, int out) {
  int fd = pair->stream;
  static uint8_t buffer[1 << 17];
  show("nothing in the pipe", splice(out, NULL, fd, NULL, 100, SPLICE_F_NONBLOCK));
  show("nothing asked for", splice(fd, NULL, in, NULL, 0, 0));
  off64_t offset = 0;
  show("an offset of the stream", splice(fd, &offset, in, NULL, 100, 0));
  show("an offset of the pipe", splice(out, &offset, fd, NULL, 100, 0));
  show("an unknown flag", splice(fd, NULL, in, NULL, 100, 0x100));
  show("the wrong end", splice(fd, NULL, out, NULL, 100, SPLICE_F_NONBLOCK));
  show("no file", splice(fd, NULL, 999, NULL, 100, 0));
  tell(pair); /* 1000 bytes come */
  await(pair);
  settle();
  CHECKED(fcntl(in, F_SETFL, O_NONBLOCK));
  while (write(in, buffer, sizeof(buffer)) > 0) {
  }
  show("a full pipe", splice(fd, NULL, in, NULL, 100, SPLICE_F_NONBLOCK));
  show("a full pipe that does not wait", splice(fd, NULL, in, NULL, 100, 0));
  CHECKED(fcntl(in, F_SETFL, 0));
  CHECKED(fcntl(out, F_SETFL, O_NONBLOCK));
  while (read(out, buffer, sizeof(buffer)) > 0) {
  }
  CHECKED(fcntl(out, F_SETFL, 0));
  CHECKED(write(in, "x", 1));
  show("a part", splice(fd, NULL, in, NULL, 300, 0));
  show("out of the pipe", read(out, buffer, 1000));
  say("intact: %d", pattern_holds(buffer + 1, 300, 0));
  int lonely[2];
  CHECKED(pipe(lonely));
  CHECKED(close(lonely[0]));
  count_signal(SIGPIPE, SA_RESTART);
  show("nobody reads the pipe", splice(fd, NULL, lonely[1], NULL, 300, 0));
  say("signals: %d", (int)signals_seen);
  receive_pattern(fd, 700, 300);
  say("nothing was lost");
  CHECKED(pipe(lonely));
  CHECKED(close(lonely[1]));
  show("nobody writes the pipe", splice(lonely[0], NULL, fd, NULL, 300, 0));
}

static void end(struct Pair* pair, int in, int out) {
  int fd = pair->stream;
  tell(pair);
  show("the end", splice(fd, NULL, in, NULL, 100, 0));
  CHECKED(write(in, "last", 4));
  show("half open", splice(out, NULL, fd, NULL, 100, 0));
  CHECKED(shutdown(fd, SHUT_WR));
  CHECKED(write(in, "more", 4));
  signals_seen = 0;
  show("after shutdown", splice(out, NULL, fd, NULL, 100, 0));
  say("signals: %d", (int)signals_seen);
}

static void relays(struct Pair* pair) {
  open_stream(pair);
  int ends[2];
  CHECKED(pipe(ends));
  if (has(pair, "waits_not")) CHECKED(fcntl(pair->stream, F_SETFL, O_NONBLOCK));
  relay(pair, ends[1], ends[0], has(pair, "waits_not") ? SPLICE_F_NONBLOCK : SPLICE_F_MOVE);
  CHECKED(fcntl(pair->stream, F_SETFL, 0));
  edges(pair, ends[1], ends[0]);
  end(pair, ends[1], ends[0]);
}

static void* send_all(void* fd) {
  send_pattern(*(int*)fd, kTotal, 0);
  return NULL;
}

static void gets_it_back(struct Pair* pair) {
  open_stream(pair);
  pthread_t sender;
  start_thread(&sender, send_all, &pair->stream);
  receive_pattern(pair->stream, kTotal, 0);
  join_thread(sender);
  say("all is back");
  await(pair);
  send_pattern(pair->stream, 1000, 0);
  tell(pair);
  await(pair);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("last", pair->stream);
}

static const struct PairCase kCases[] = {
    {"in_server", relays, gets_it_back, true},
    {"in_client", gets_it_back, relays, true},
    {"in_server_waits_not", relays, gets_it_back, true},
};
PAIR_MAIN(kCases)
