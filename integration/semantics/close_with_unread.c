/* Closing a socket that holds unread bytes is a reset: the peer reads what it already has, then
 * ECONNRESET.  SO_LINGER with time 0 does the same without unread bytes. */
#include "pair.h"

static void closer(struct Pair* pair) {
  open_stream(pair);
  if (strstr(pair->variant, "both_hold") != NULL) send_pattern(pair->stream, 500, 0);
  tell(pair);
  await(pair);
  settle();
  struct linger linger = {1, 0};
  if (strstr(pair->variant, "linger_0") != NULL) {
    show("SO_LINGER", setsockopt(pair->stream, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)));
  }
  if (strstr(pair->variant, "linger_5") != NULL) {
    linger.l_linger = 5;
    show("SO_LINGER", setsockopt(pair->stream, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)));
  }
  int64_t start = now_ns();
  show("close", close(pair->stream));
  measure("close took ms", ms_since(start), 100);
  tell(pair);
}

static void other(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  count_signal(SIGPIPE, SA_RESTART);
  if (strstr(pair->variant, "unread") != NULL) send_pattern(pair->stream, 1000, 0);
  tell(pair);
  await(pair);
  settle();
  struct pollfd one = {pair->stream, POLLIN | POLLOUT | POLLRDHUP, 0};
  show("poll", poll(&one, 1, 1000));
  show_events("poll says", one.revents);
  if (strstr(pair->variant, "so_error") != NULL) {
    int error = -1;
    socklen_t size = sizeof(error);
    show("getsockopt", getsockopt(pair->stream, SOL_SOCKET, SO_ERROR, &error, &size));
    say("SO_ERROR: %s", strerrorname_np(error));
  }
  if (strstr(pair->variant, "sender") != NULL) {
    show("send", send(pair->stream, "x", 1, 0));
    show("send again", send(pair->stream, "x", 1, 0));
    say("SIGPIPE: %d", (int)signals_seen);
  }
  drain("drained", pair->stream);
  show("recv again", recv(pair->stream, &(char){0}, 1, 0));
  show("send last", send(pair->stream, "x", 1, 0));
  say("SIGPIPE: %d", (int)signals_seen);
}

static const struct PairCase kCases[] = {
    {"unread", closer, other, true},
    {"unread_by_client", other, closer, true},
    {"unread_sender", closer, other, true},
    {"unread_so_error", closer, other, true},
    {"unread_both_hold", closer, other, true},
    {"linger_0", closer, other, true},
    {"linger_0_both_hold", other, closer, true},
    {"linger_5_both_hold", closer, other, true},
};
PAIR_MAIN(kCases)
