/* One blocking call that sends much more than fits anywhere, as the first on its stream: it is lifted in the middle, and
 * the call ends as it does on TCP. */
#include "pair.h"

enum { kLong = 96 << 20, kBlock = 64 << 10 };
static const struct timeval kWait = {.tv_usec = 400000};

static bool has(const struct Pair* pair, const char* word) { return strstr(pair->variant, word) != NULL; }

static void on_signal(int number) { (void)number; }

static void* send_signals(void* thread) {
  sleep_ms(500);
  pthread_kill(*(pthread_t*)thread, SIGUSR1);
  return NULL;
}

/* Its socket does not wait, since before the connection was there. */
static void open_without_waiting(struct Pair* pair) {
  learn_address(pair);
  pair->stream = (int)CHECKED(socket(pair->address.sin6_family, SOCK_STREAM | SOCK_NONBLOCK, 0));
  if (connect(pair->stream, (struct sockaddr*)&pair->address, pair->address_size) != 0 && errno != EINPROGRESS) {
    fail("connect: %s", strerrorname_np(errno));
  }
  struct pollfd one = {pair->stream, POLLOUT, 0};
  CHECKED(poll(&one, 1, -1));
}

static void sends(struct Pair* pair) {
  if (has(pair, "never_waits")) {
    open_without_waiting(pair);
  } else {
    open_cold_stream(pair);
  }
  uint8_t* bytes = malloc(kLong);
  if (bytes == NULL) fail("malloc");
  fill_pattern(bytes, kLong, 0);
  if (has(pair, "timeout")) CHECKED(setsockopt(pair->stream, SOL_SOCKET, SO_SNDTIMEO, &kWait, sizeof(kWait)));
  pthread_t self = pthread_self(), signaller;
  if (has(pair, "interrupted")) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    CHECKED(sigaction(SIGUSR1, &action, NULL));
    start_thread(&signaller, send_signals, &self);
  }
  struct iovec parts[3] = {{bytes, 1}, {bytes + 1, kLong / 2}, {bytes + 1 + kLong / 2, kLong / 2 - 1}};
  long sent = has(pair, "writev") ? writev(pair->stream, parts, 3) : send(pair->stream, bytes, kLong, MSG_NOSIGNAL);
  if (has(pair, "interrupted")) join_thread(signaller);
  say("sent: %s", sent == kLong ? "all" : sent > 0 ? "a part" : "nothing");
  CHECKED(send(pair->control, &sent, sizeof(sent), 0));
  await(pair);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  await(pair);
}

static void receives(struct Pair* pair) {
  open_cold_stream(pair);
  long total = kLong;
  if (has(pair, "stopped")) CHECKED(recv(pair->control, &total, sizeof(total), 0));
  uint64_t at = 0;
  /* Slowly, as long as all of it came by TCP. */
  int64_t start = now_ns();
  while (!has(pair, "stopped") && at + kBlock <= (uint64_t)total && lift_limit_ms() != 0 &&
         ms_since(start) < lift_limit_ms() && tcp_carried(pair->stream) >= at) {
    receive_pattern(pair->stream, kBlock, at);
    at += kBlock;
    sleep_ms(2);
  }
  receive_pattern(pair->stream, (size_t)total - at, at);
  if (!has(pair, "stopped"))
    say("lifted: %s", lift_limit_ms() == 0 || tcp_carried(pair->stream) < (uint64_t)total ? "in the middle" : "NO");
  if (!has(pair, "stopped")) CHECKED(recv(pair->control, &total, sizeof(total), 0));
  tell(pair);
  drain("no more", pair->stream);
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"send", receives, sends, true},
    {"writev", sends, receives, true},
    {"stopped_timeout", receives, sends, false},
    {"stopped_interrupted", sends, receives, false},
    {"stopped_never_waits", receives, sends, false},
};
PAIR_MAIN(kCases)
