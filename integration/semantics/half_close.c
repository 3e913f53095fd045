/* One end says that it has nothing more to send; the other still has, and all of it must arrive. */
#include "pair.h"

/* kUnread fits into the first window of TCP, so that the FIN is there before the reader starts. */
enum { kReply = 1 << 20, kUnread = 40 << 10 };

static void shut_then_drain(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, kReply, 0);
  show("shutdown", shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
  show("send after shutdown", send(pair->stream, "x", 1, MSG_NOSIGNAL));
  show("recv again", recv(pair->stream, &(char){0}, 1, 0));
}

static void drain_then_reply(struct Pair* pair) {
  open_stream(pair);
  drain("drained", pair->stream);
  settle();
  send_pattern(pair->stream, kReply, 0);
  show("close", close(pair->stream));
}

/* Everything waits unread in the reader's buffer when the FIN arrives. */
static void shut_before_reader_starts(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, kUnread, 0);
  show("shutdown", shutdown(pair->stream, SHUT_WR));
  tell(pair);
  drain("drained", pair->stream);
}

static void read_late(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  settle();
  struct pollfd one = {pair->stream, POLLIN | POLLRDHUP, 0};
  show("poll", poll(&one, 1, 1000));
  show_events("before reading", one.revents);
  drain("drained", pair->stream);
  one.revents = 0;
  show("poll", poll(&one, 1, 1000));
  show_events("after reading", one.revents);
  send_pattern(pair->stream, kReply, 0);
  show("close", close(pair->stream));
}

static void both_shut(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, 1000, 0);
  show("shutdown", shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
  tell(pair);
  await(pair);
  settle();
  struct pollfd one = {pair->stream, POLLIN | POLLOUT | POLLRDHUP, 0};
  show("poll", poll(&one, 1, 1000));
  show_events("both directions closed", one.revents);
  show("shutdown again", shutdown(pair->stream, SHUT_RDWR));
  show("close", close(pair->stream));
}

static void shut_reading(struct Pair* pair) {
  open_stream(pair);
  show("shutdown", shutdown(pair->stream, SHUT_RD));
  show("recv", recv(pair->stream, &(char){0}, 1, 0));
  tell(pair);
  await(pair);
  settle();
  char buffer[64];
  show("recv of later data", recv(pair->stream, buffer, sizeof(buffer), 0));
  show("recv at the end", recv(pair->stream, buffer, sizeof(buffer), 0));
  show("send still works", send(pair->stream, buffer, 7, MSG_NOSIGNAL));
  tell(pair);
}

static void send_to_one_that_shut_reading(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  show("send", send(pair->stream, "0123456789", 10, MSG_NOSIGNAL));
  tell(pair);
  await(pair);
  char buffer[64];
  show("recv", recv(pair->stream, buffer, sizeof(buffer), 0));
}

static void shut_everything(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, 5000, 0);
  show("shutdown", shutdown(pair->stream, SHUT_RDWR));
  show("recv", recv(pair->stream, &(char){0}, 1, 0));
  show("send", send(pair->stream, "x", 1, MSG_NOSIGNAL));
  tell(pair);
  await(pair);
}

static void drain_one_that_shut_everything(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  drain("drained", pair->stream);
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"client_shuts", drain_then_reply, shut_then_drain, true},
    {"server_shuts", shut_then_drain, drain_then_reply, true},
    {"client_shuts_before_reader_starts", read_late, shut_before_reader_starts, true},
    {"server_shuts_before_reader_starts", shut_before_reader_starts, read_late, true},
    {"both_shut", both_shut, both_shut, true},
    {"shut_reading", send_to_one_that_shut_reading, shut_reading, true},
    {"shut_everything", drain_one_that_shut_everything, shut_everything, true},
};
PAIR_MAIN(kCases)
