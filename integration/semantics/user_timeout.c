/* TCP_USER_TIMEOUT: a peer that takes nothing for so long has lost the connection, also if it lives and only
 * does not read. */
#include "pair.h"

enum { kLimitMs = 1500 };

static void sender(struct Pair* pair) {
  static char block[65536];
  open_stream(pair);
  int fd = pair->stream;
  CHECKED(setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &(int){kLimitMs}, sizeof(int)));
  count_signal(SIGPIPE, SA_RESTART);
  int64_t start = now_ns();
  if (strstr(pair->variant, "poll") != NULL) {
    fill_until_full(fd);
    start = now_ns();
    struct pollfd one = {fd, POLLOUT, 0};
    show("poll", poll(&one, 1, 8000));
    show_events("  says", one.revents);
  } else {
    while (send(fd, block, sizeof(block), MSG_NOSIGNAL) > 0) continue;
    show("send", -1);
  }
  say("not before its time: %d", ms_since(start) > kLimitMs / 2);
  measure("after ms", ms_since(start), 1500);
  show("recv", recv(fd, block, 1, 0));
  show("send", send(fd, block, 1, MSG_NOSIGNAL));
  tell(pair);
  await(pair);
}

static void sleeper(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"send", sleeper, sender, true},
    {"poll", sleeper, sender, true},
};
PAIR_MAIN(kCases)
