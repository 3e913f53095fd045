/* A bad address in a call is EFAULT, not a crash, and the stream goes on.  Linux checks before it
 * copies; whoever copies in user space has to find another way to the same answer. */
#include <sys/mman.h>

#include "pair.h"

static void bad_calls(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  void* bad = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
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

static const struct PairCase kCases[] = {{"efault", good_peer, bad_calls, true}};
PAIR_MAIN(kCases)
