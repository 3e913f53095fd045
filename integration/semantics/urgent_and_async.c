/* MSG_OOB, SIOCATMARK, POLLPRI and SIGURG, and O_ASYNC with SIGIO: seldom used, never wrong. */
#include "pair.h"

static void urgent_receiver(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  count_signal(SIGURG, SA_RESTART);
  CHECKED(fcntl(fd, F_SETOWN, getpid()));
  tell(pair);
  await(pair);
  sleep_ms(50);
  say("SIGURG: %d", (int)signals_seen);
  struct pollfd one = {fd, POLLIN | POLLPRI, 0};
  show("poll", poll(&one, 1, 1000));
  show_events("poll says", one.revents);
  char text[32] = "";
  int mark = -1;
  show("recv before the mark", recv(fd, text, sizeof(text), 0));
  show("SIOCATMARK", ioctl(fd, SIOCATMARK, &mark));
  say("at mark: %d", mark);
  show("MSG_OOB", recv(fd, text, 1, MSG_OOB));
  say("urgent byte: %c", text[0]);
  show("recv after the mark", recv(fd, text, sizeof(text), 0));
  show("MSG_OOB again", recv(fd, text, 1, MSG_OOB));
  ping_as_client(fd, 8);
}

static void urgent_sender(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  CHECKED(send(pair->stream, "before", 6, 0));
  show("MSG_OOB", send(pair->stream, "!", 1, MSG_OOB));
  CHECKED(send(pair->stream, "after", 5, 0));
  tell(pair);
  pong_as_server(pair->stream, 8);
}

static void async_receiver(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  count_signal(SIGIO, SA_RESTART);
  CHECKED(fcntl(fd, F_SETOWN, getpid()));
  show("O_ASYNC", fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_ASYNC));
  signals_seen = 0;
  tell(pair);
  await(pair);
  sleep_ms(50);
  say("SIGIO: %s", signals_seen > 0 ? "yes" : "NO");
  char text[8];
  show("recv", recv(fd, text, sizeof(text), 0));
  CHECKED(fcntl(fd, F_SETFL, 0));
  ping_as_client(fd, 8);
}

static void async_sender(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  sleep_ms(20);
  CHECKED(send(pair->stream, "signal", 6, 0));
  tell(pair);
  pong_as_server(pair->stream, 8);
}

static const struct PairCase kCases[] = {
    {"urgent_to_server", urgent_receiver, urgent_sender, true},
    {"urgent_to_client", urgent_sender, urgent_receiver, true},
    {"async", async_sender, async_receiver, true},
};
PAIR_MAIN(kCases)
