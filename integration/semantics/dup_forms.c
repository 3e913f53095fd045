/* dup, dup2, dup3, F_DUPFD and pidfd_getfd make another name for the same stream; it lives until the last one.
 */
#include <sys/pidfd.h>

#include "pair.h"

static int copy_of(const struct Pair* pair, int fd) {
  const char* how = pair->variant;
  if (strcmp(how, "dup") == 0) return dup(fd);
  if (strcmp(how, "dup2") == 0) return dup2(fd, 77);
  if (strcmp(how, "dup3") == 0) return dup3(fd, 78, O_CLOEXEC);
  if (strcmp(how, "f_dupfd") == 0) return fcntl(fd, F_DUPFD, 90);
  if (strcmp(how, "f_dupfd_cloexec") == 0) return fcntl(fd, F_DUPFD_CLOEXEC, 91);
  if (strcmp(how, "dup2_onto_0") == 0) return dup2(fd, 0);
  if (strcmp(how, "pidfd_getfd") == 0) return pidfd_getfd((int)CHECKED(pidfd_open(getpid(), 0)), fd, 0);
  return -1;
}

static void duplicator(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  int copy = (int)CHECKED(copy_of(pair, fd));
  show("close on exec", fcntl(copy, F_GETFD));
  ping_as_client(copy, 8);
  ping_as_client(fd, 8);
  CHECKED(fcntl(copy, F_SETFL, O_NONBLOCK)); /* shared by both names */
  show("recv of the first", recv(fd, &(char){0}, 1, 0));
  CHECKED(fcntl(fd, F_SETFL, 0));
  show("close", close(fd));
  show("recv of the closed", recv(fd, &(char){0}, 1, 0));
  ping_as_client(copy, 8);
  show("dup onto itself", dup2(copy, copy) == copy);
  show("dup3 onto itself", dup3(copy, copy, 0));
  ping_as_client(copy, 8);
  int back = (int)CHECKED(dup(copy));
  ping_as_client(back, 8);
  show("close copy", close(copy));
  show("shutdown", shutdown(back, SHUT_WR));
  drain("drained", back);
  show("close last", close(back));
}

static void echo_to_end(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 40);
  drain("drained", pair->stream);
  send_pattern(pair->stream, 70000, 0);
}

/* dup2 onto a lifted stream closes it; the peer sees the end, the number has a new meaning. */
static void overwrite(struct Pair* pair) {
  open_stream(pair);
  int ends[2];
  CHECKED(pipe(ends));
  send_pattern(pair->stream, 70000, 0);
  show("dup2 onto the stream", dup2(ends[1], pair->stream) == pair->stream);
  show("write", write(pair->stream, "to the pipe", 11));
  char text[12] = "";
  show("read", read(ends[0], text, 11));
  say("text: %s", text);
  tell(pair);
  await(pair);
}

static void see_end(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  drain("drained", pair->stream);
  tell(pair);
}

/* Two lifted streams change places and each keeps its own bytes. */
static void exchange(struct Pair* pair) {
  open_stream(pair);
  int first = pair->stream;
  open_stream(pair);
  int second = pair->stream;
  int spare = (int)CHECKED(dup(first));
  CHECKED(dup2(second, first));
  CHECKED(dup2(spare, second));
  CHECKED(close(spare));
  CHECKED(send(first, "second", 6, 0));
  CHECKED(send(second, "first", 5, 0));
  ping_as_client(first, 8);
  ping_as_client(second, 8);
}

static void two_streams(struct Pair* pair) {
  open_stream(pair);
  int first = pair->stream;
  open_stream(pair);
  char text[10] = "";
  show("on the first", recv(first, text, 5, MSG_WAITALL));
  say("text: %s", text);
  show("on the second", recv(pair->stream, text, 6, MSG_WAITALL));
  say("text: %s", text);
  pong_as_server(pair->stream, 8);
  pong_as_server(first, 8);
}

static const struct PairCase kCases[] = {
    {"dup", echo_to_end, duplicator, true},
    {"dup2", echo_to_end, duplicator, true},
    {"dup3", echo_to_end, duplicator, true},
    {"f_dupfd", echo_to_end, duplicator, true},
    {"f_dupfd_cloexec", echo_to_end, duplicator, true},
    {"dup2_onto_0", echo_to_end, duplicator, true},
    {"pidfd_getfd", echo_to_end, duplicator, true},
    {"overwritten_by_dup2", see_end, overwrite, true},
    {"server_overwritten_by_dup2", overwrite, see_end, true},
    {"two_streams_change_places", two_streams, exchange, true},
};
PAIR_MAIN(kCases)
