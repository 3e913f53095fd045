/* MSG_PEEK, MSG_WAITALL, MSG_DONTWAIT, MSG_TRUNC and MSG_NOSIGNAL on a lifted stream. */
#include "pair.h"

static void show_text(const char* label, const char* text, long size) {
  if (size < 0) {
    show(label, size);
  } else {
    say("%s: %ld \"%.*s\"", label, size, (int)size, text);
  }
}

static void receiver(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  char text[64] = "";
  show("recv of nothing, MSG_DONTWAIT", recv(fd, text, 10, MSG_DONTWAIT));
  show("peek of nothing, MSG_DONTWAIT", recv(fd, text, 10, MSG_PEEK | MSG_DONTWAIT));
  show("recv of size 0", recv(fd, text, 0, MSG_DONTWAIT));
  tell(pair);
  await(pair);
  sleep_ms(20);
  show_text("peek", text, recv(fd, text, 4, MSG_PEEK));
  show_text("peek more", text, recv(fd, text, sizeof(text), MSG_PEEK));
  show_text("recv", text, recv(fd, text, 4, 0));
  show_text("peek the rest", text, recv(fd, text, sizeof(text), MSG_PEEK | MSG_DONTWAIT));
  show_text("recvfrom", text, recvfrom(fd, text, 2, 0, NULL, NULL));
  show("MSG_TRUNC without a buffer", recv(fd, NULL, 3, MSG_TRUNC));
  show_text("recv after MSG_TRUNC", text, recv(fd, text, sizeof(text), 0));
  show("recv of size 0 when empty", recv(fd, text, 0, MSG_DONTWAIT));

  tell(pair); /* the sender writes 3 times 4 bytes with pauses */
  show_text("MSG_WAITALL", text, recv(fd, text, 12, MSG_WAITALL));
  tell(pair);
  show_text("MSG_WAITALL | MSG_PEEK", text, recv(fd, text, 12, MSG_WAITALL | MSG_PEEK));
  show_text("recv of the same", text, recv(fd, text, 12, MSG_WAITALL));
  tell(pair);
  await(pair);
  sleep_ms(20);
  show_text("MSG_WAITALL | MSG_DONTWAIT", text, recv(fd, text, 40, MSG_WAITALL | MSG_DONTWAIT));
  struct iovec parts[2] = {{text, 3}, {text + 3, 30}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
  tell(pair);
  show("recvmsg MSG_WAITALL to EOF", recvmsg(fd, &message, MSG_WAITALL));
  say("msg_flags: 0x%x", message.msg_flags);
  show("peek at EOF", recv(fd, text, 1, MSG_PEEK));
  show("recv at EOF", recv(fd, text, 1, MSG_WAITALL));
  show("MSG_TRUNC at EOF", recv(fd, NULL, 3, MSG_TRUNC));
}

static void send_in_parts(int fd) {
  for (int i = 0; i < 3; ++i) {
    CHECKED(send(fd, &"abcdefghijkl"[4 * i], 4, MSG_NOSIGNAL));
    settle();
  }
}

static void sender(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  await(pair);
  show("send", send(fd, "0123456789abcdef", 16, 0));
  show("send of size 0", send(fd, "", 0, 0));
  tell(pair);
  await(pair);
  send_in_parts(fd);
  await(pair);
  send_in_parts(fd);
  await(pair);
  show("MSG_MORE", send(fd, "more", 4, MSG_MORE));
  show("then all", send(fd, "!", 1, MSG_DONTWAIT));
  sleep_ms(20);
  tell(pair);
  await(pair);
  CHECKED(send(fd, "the end", 7, MSG_EOR));
  sleep_ms(20);
  CHECKED(close(fd));
}

static void gone(struct Pair* pair) {
  open_stream(pair);
  CHECKED(close(pair->stream));
  tell(pair);
}

static void writes_to_gone(struct Pair* pair) {
  open_stream(pair);
  count_signal(SIGPIPE, SA_RESTART);
  int fd = pair->stream;
  await(pair);
  sleep_ms(20);
  show("first send", send(fd, "x", 1, 0));
  sleep_ms(20);
  show("MSG_NOSIGNAL", send(fd, "x", 1, MSG_NOSIGNAL));
  say("SIGPIPE: %d", (int)signals_seen);
  show("send", send(fd, "x", 1, 0));
  show("write", write(fd, "x", 1));
  show("writev", writev(fd, &(struct iovec){"x", 1}, 1));
  struct msghdr message = {.msg_iov = &(struct iovec){"x", 1}, .msg_iovlen = 1};
  show("sendmsg", sendmsg(fd, &message, 0));
  show("sendmsg MSG_NOSIGNAL", sendmsg(fd, &message, MSG_NOSIGNAL));
  say("SIGPIPE: %d", (int)signals_seen);
}

static const struct PairCase kCases[] = {
    {"server_receives", receiver, sender, true},
    {"client_receives", sender, receiver, true},
    {"broken_pipe", gone, writes_to_gone, true},
};
PAIR_MAIN(kCases)
