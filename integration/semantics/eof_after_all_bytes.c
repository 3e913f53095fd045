/* The end of the stream comes after the last byte, never before it, for small and large amounts. */
#include "pair.h"

static size_t bytes_of(const struct Pair* pair) {
  return (size_t)atol(strrchr(pair->variant, '_') + 1);
}

static void write_and_end(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, bytes_of(pair), 0);
  if (strncmp(pair->variant, "shutdown", 8) == 0) {
    show("shutdown", shutdown(pair->stream, SHUT_WR));
    drain("peer's end", pair->stream);
  }
  show("close", close(pair->stream));
}

static void read_to_end(struct Pair* pair) {
  open_stream(pair);
  drain("drained", pair->stream);
  char byte;
  show("recv again", recv(pair->stream, &byte, 1, 0));
  show("read again", read(pair->stream, &byte, 1));
  struct pollfd one = {pair->stream, POLLIN | POLLRDHUP, 0};
  show("poll", poll(&one, 1, 0));
  show_events("at the end", one.revents);
}

static const struct PairCase kCases[] = {
    {"close_0", read_to_end, write_and_end, true},
    {"close_1", read_to_end, write_and_end, true},
    {"close_65537", read_to_end, write_and_end, true},
    {"close_8388608", read_to_end, write_and_end, true},
    {"shutdown_1", write_and_end, read_to_end, true},
    {"shutdown_65537", write_and_end, read_to_end, true},
    {"shutdown_8388608", write_and_end, read_to_end, true},
};
PAIR_MAIN(kCases)
