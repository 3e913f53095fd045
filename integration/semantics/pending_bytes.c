/* FIONREAD and SIOCOUTQ count what lies in the stream, wherever it lies. */
#include <linux/sockios.h>

#include "pair.h"

static void show_pending(const char* label, int fd) {
  int bytes = -1;
  long result = ioctl(fd, FIONREAD, &bytes);
  show("ioctl", result);
  say("%s: %d", label, bytes);
}

static void reader(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  show_pending("at first", fd);
  tell(pair);
  await(pair);
  settle();
  show_pending("after 1000 bytes", fd);
  char buffer[100000];
  CHECKED(recv(fd, buffer, 300, 0));
  show_pending("after reading 300", fd);
  CHECKED(recv(fd, buffer, 100, MSG_PEEK));
  show_pending("after peeking", fd);
  CHECKED(recv(fd, buffer, 700, MSG_WAITALL));
  show_pending("after reading all", fd);
  tell(pair);
  await(pair);
  settle();
  show_pending("50000 bytes and a FIN", fd);
  CHECKED(recv(fd, buffer, 50000, MSG_WAITALL));
  show_pending("only the FIN", fd);
  show("recv", recv(fd, buffer, 1, 0));
  show_pending("after EOF", fd);
  int queued = -1;
  show("SIOCOUTQ", ioctl(fd, SIOCOUTQ, &queued));
  say("own queue: %d", queued);
}

static void writer(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  await(pair);
  send_pattern(fd, 1000, 0);
  tell(pair);
  await(pair);
  int queued = -1;
  settle();
  show("SIOCOUTQ", ioctl(fd, SIOCOUTQ, &queued));
  say("queued after all was read: %d", queued);
  send_pattern(fd, 50000, 0);
  settle();
  show("SIOCOUTQ", ioctl(fd, SIOCOUTQ, &queued));
  say("queued while nobody reads: %d", queued); /* it is in the peer's buffer */
  show("SIOCOUTQNSD", ioctl(fd, SIOCOUTQNSD, &queued));
  say("not sent: %d", queued);
  CHECKED(shutdown(fd, SHUT_WR));
  tell(pair);
  drain("peer's end", fd);
}

/* More than the peer's buffer takes. */
static void fills(struct Pair* pair) {
  open_stream(pair);
  fill_until_full(pair->stream);
  int queued = -1, unsent = -1;
  CHECKED(ioctl(pair->stream, SIOCOUTQ, &queued));
  CHECKED(ioctl(pair->stream, SIOCOUTQNSD, &unsent));
  say("much is queued: %d, and not sent: %d", queued > 100000, unsent > 100000);
  tell(pair);
  await(pair);
  settle();
  CHECKED(ioctl(pair->stream, SIOCOUTQ, &queued));
  CHECKED(ioctl(pair->stream, SIOCOUTQNSD, &unsent));
  say("when all was read: %d %d", queued, unsent);
}

static void empties(struct Pair* pair) {
  static char buffer[1 << 20];
  open_stream(pair);
  await(pair);
  for (struct pollfd one = {pair->stream, POLLIN, 0}; poll(&one, 1, 300) == 1;) {
    CHECKED(recv(pair->stream, buffer, sizeof(buffer), 0));
  }
  tell(pair);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"client_fills", empties, fills, true},
    {"server_reads", reader, writer, true},
    {"client_reads", writer, reader, true},
};
PAIR_MAIN(kCases)
