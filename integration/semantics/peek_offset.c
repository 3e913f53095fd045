/* SO_PEEK_OFF: MSG_PEEK goes on where the last one ended; what is read for good moves it back (tcp(7), Linux
 * 6.9; earlier the option is refused, which has to look the same, too). */
#include "pair.h"

static void set_offset(int fd, int value) {
  show("SO_PEEK_OFF", setsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &value, sizeof(value)));
  int now = -77;
  socklen_t size = sizeof(now);
  show("getsockopt", getsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &now, &size));
  say("offset: %d", now);
}

static void peek(int fd, int bytes) {
  char text[32] = "";
  long got = recv(fd, text, (size_t)bytes, MSG_PEEK | MSG_DONTWAIT);
  show("peek", got);
  if (got > 0) say("  \"%.*s\"", (int)got, text);
}

static void reader(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  char text[32] = "";
  set_offset(fd, 0);
  tell(pair);
  await(pair);
  settle();
  peek(fd, 4);
  peek(fd, 4);
  set_offset(fd, 2);
  peek(fd, 4);
  show("recv", recv(fd, text, 3, 0));
  peek(fd, 4);
  peek(fd, 20);
  peek(fd, 20);
  set_offset(fd, -1);
  peek(fd, 4);
  peek(fd, 4);
  show("recv", recv(fd, text, sizeof(text), 0));
  ping_as_client(fd, 8);
}

static void sender(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  CHECKED(send(pair->stream, "0123456789abcdef", 16, 0));
  tell(pair);
  pong_as_server(pair->stream, 8);
}

static const struct PairCase kCases[] = {
    {"server_peeks", reader, sender, true},
    {"client_peeks", sender, reader, true},
};
PAIR_MAIN(kCases)
