/* A stream that comes to 0, 1 or 2, as inetd hands it to its children: stdin and stdout read and
 * write there inside libc, and close there. */
#include "pair.h"

static void lines_by_stdio(struct Pair* pair) {
  open_stream(pair);
  const int kept = (int)CHECKED(dup(0));
  CHECKED(dup2(pair->stream, 0));
  tell(pair);
  char line[64];
  for (int i = 0; i < 20; ++i) {
    if (fgets(line, sizeof(line), stdin) == NULL) fail("no line");
    say("line: %s", strtok(line, "\n"));
    send_pattern(pair->stream, 3000, (uint64_t)i * 3000);
  }
  show("fclose", fclose(stdin)); /* one name goes, the other stays */
  const int zero = open("/dev/zero", O_RDONLY);
  show("number", zero);
  uint8_t bytes[3] = {1, 1, 1};
  show("read of a file", read(zero, bytes, sizeof(bytes)));
  show("recv of a file", recv(zero, bytes, sizeof(bytes), 0));
  send_pattern(pair->stream, 3000, 60000);
  show("last name", close(pair->stream));
  CHECKED(dup2(kept, 0));
}

static void peer_of_lines(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  for (int i = 0; i < 20; ++i) {
    char line[64];
    const int size = snprintf(line, sizeof(line), "number %d\n", i);
    show("send", send(pair->stream, line, (size_t)size, 0));
    receive_pattern(pair->stream, 3000, (uint64_t)i * 3000);
  }
  receive_pattern(pair->stream, 3000, 60000);
  drain("drained", pair->stream);
}

/* The kernel gives 0 to the next socket, after a daemon closed its own. */
static void connected_at_zero(struct Pair* pair, bool accepts) {
  if (accepts) {
    listen_on_loopback(pair, AF_INET, 1);
  } else {
    learn_address(pair);
  }
  const int kept = (int)CHECKED(dup(0));
  CHECKED(close(0));
  open_stream(pair);
  show("number", pair->stream);
  tell(pair);
  char line[64];
  if (fgets(line, sizeof(line), stdin) == NULL) fail("no line");
  say("line: %s", strtok(line, "\n"));
  show("freopen", freopen("/dev/zero", "r", stdin) != NULL);
  say("first byte: %d", fgetc(stdin));
  show("recv", recv(0, line, 1, 0));
  CHECKED(dup2(kept, 0));
}

static void accepted_at_zero(struct Pair* pair) { connected_at_zero(pair, true); }
static void connects_at_zero(struct Pair* pair) { connected_at_zero(pair, false); }

static void peer_of_zero(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  show("send", send(pair->stream, "a line\n", 7, 0));
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"server_reads_stdin", lines_by_stdio, peer_of_lines, true},
    {"client_reads_stdin", peer_of_lines, lines_by_stdio, true},
    {"accepted_at_0", accepted_at_zero, peer_of_zero, false},
    {"connected_at_0", peer_of_zero, connects_at_zero, false},
};
PAIR_MAIN(kCases)
