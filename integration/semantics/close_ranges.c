/* Programs that close every descriptor above their own must not cut the stream off, a drop of
 * RLIMIT_NOFILE neither, and new descriptors stay the lowest free ones. */
#include <sys/resource.h>

#include "pair.h"

static int lowest_free(void) {
  int fd = (int)CHECKED(open("/dev/null", O_RDONLY | O_CLOEXEC));
  close(fd);
  return fd;
}

static int highest_own(const struct Pair* pair) {
  int top = pair->stream > pair->control ? pair->stream : pair->control;
  return top > pair->listener ? top : pair->listener;
}

static void close_the_rest(const struct Pair* pair) {
  int from = highest_own(pair) + 1;
  if (strstr(pair->variant, "close_range") != NULL) {
    show("close_range", close_range((unsigned)from, ~0u, 0));
  } else if (strstr(pair->variant, "cloexec_range") != NULL) {
    show("close_range CLOEXEC", close_range((unsigned)from, ~0u, CLOSE_RANGE_CLOEXEC));
  } else if (strstr(pair->variant, "closefrom") != NULL) {
    closefrom(from);
  } else if (strstr(pair->variant, "loop") != NULL) {
    int closed = 0;
    for (int fd = from; fd < 70000; ++fd) closed += close(fd) == 0;
    say("closed: %d", closed);
  } else if (strstr(pair->variant, "rlimit") != NULL) {
    struct rlimit limit = {(rlim_t)from + 2, (rlim_t)from + 2};
    show("setrlimit", setrlimit(RLIMIT_NOFILE, &limit));
    int fds[2];
    show("pipe", pipe(fds));
    show("one more", dup(0));
    close(fds[0]);
    close(fds[1]);
  }
}

static void closer(struct Pair* pair) {
  int before = lowest_free();
  open_stream(pair);
  say("stream got the lowest number: %d", pair->stream - before == (pair->listener >= 0 ? 1 : 0));
  say("next is the lowest: %d", lowest_free() == highest_own(pair) + 1);
  close_the_rest(pair);
  ping_as_client(pair->stream, 8);
  close_the_rest(pair);
  say("next is the lowest: %d", lowest_free() == highest_own(pair) + 1);
  send_pattern(pair->stream, 300000, 0);
  ping_as_client(pair->stream, 8);
  CHECKED(close(pair->stream));
  if (strstr(pair->variant, "rlimit") == NULL) {
    open_stream(pair); /* another one lifts after all that */
    ping_as_client(pair->stream, 8);
  }
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 8);
  receive_pattern(pair->stream, 300000, 0);
  pong_as_server(pair->stream, 8);
  drain("drained", pair->stream);
  CHECKED(close(pair->stream));
  if (strstr(pair->variant, "rlimit") == NULL) {
    open_stream(pair);
    pong_as_server(pair->stream, 8);
    drain("drained", pair->stream);
  }
}

static void range_with_stream(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, 70000, 0);
  show("close_range", close_range((unsigned)pair->stream, (unsigned)pair->stream, 0));
  show("recv", recv(pair->stream, &(char){0}, 1, 0));
  show("close_range reversed", close_range(9, 8, 0));
  show("close_range flags", close_range(900, 901, 0x100));
  await(pair);
}

static void see_end(struct Pair* pair) {
  open_stream(pair);
  drain("drained", pair->stream);
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"close_range", peer, closer, true},
    {"close_range_in_server", closer, peer, true},
    {"cloexec_range", peer, closer, true},
    {"closefrom", closer, peer, true},
    {"loop", peer, closer, true},
    {"rlimit", closer, peer, true},
    {"range_with_stream", see_end, range_with_stream, true},
};
PAIR_MAIN(kCases)
