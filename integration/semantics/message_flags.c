/* Flags and forms that are seldom used: calls for nothing, MSG_MORE and TCP_CORK, MSG_ERRQUEUE,
 * MSG_FASTOPEN, MSG_CMSG_CLOEXEC, flags that nobody knows, recvmmsg with limits. */
#include "pair.h"

#ifndef MSG_PROBE
#define MSG_PROBE 0x10
#endif

static void calls_for_nothing(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  char byte = 'x';
  struct msghdr empty = {0};
  show("send", send(fd, &byte, 0, 0));
  show("send of NULL", send(fd, NULL, 0, 0));
  show("write", write(fd, &byte, 0));
  show("writev", writev(fd, &(struct iovec){&byte, 0}, 1));
  show("sendmsg", sendmsg(fd, &empty, 0));
  show("read", read(fd, &byte, 0));
  show("readv", readv(fd, &(struct iovec){&byte, 0}, 1));
  show("recv, not waiting", recv(fd, &byte, 0, MSG_DONTWAIT));
  show("recvmsg, not waiting", recvmsg(fd, &empty, MSG_DONTWAIT));
  tell(pair);
  await(pair);
  settle();
  show("recv of nothing", recv(fd, &byte, 0, 0));
  show("recvmsg of nothing", recvmsg(fd, &empty, 0));
  show("peek of nothing", recv(fd, &byte, 0, MSG_PEEK));
  show("what is there", recv(fd, &byte, 1, 0));
  CHECKED(shutdown(fd, SHUT_WR));
  show("send after the end", send(fd, &byte, 0, MSG_NOSIGNAL));
  show("write after the end", write(fd, &byte, 0));
  drain("drained", fd);
  show("recv of nothing at the end", recv(fd, &byte, 0, 0));
}

static void odd_flags(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  char text[64] = "", control[64];
  struct iovec part = {text, sizeof(text)};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
  show("MSG_ERRQUEUE, recv", recv(fd, text, 1, MSG_ERRQUEUE));
  show("MSG_ERRQUEUE, recvmsg", recvmsg(fd, &message, MSG_ERRQUEUE));
  tell(pair);
  await(pair);
  settle();
  show("MSG_ERRQUEUE beside bytes", recv(fd, text, 1, MSG_ERRQUEUE | MSG_DONTWAIT));
  message.msg_controllen = sizeof(control);
  part.iov_len = 4;
  show("MSG_CMSG_CLOEXEC", recvmsg(fd, &message, MSG_CMSG_CLOEXEC));
  say("flags %x control %zu", message.msg_flags, (size_t)message.msg_controllen);
  show("an unknown flag", recv(fd, text, 4, 0x8000000));
  show("MSG_CONFIRM", send(fd, "c", 1, MSG_CONFIRM));
  show("MSG_DONTROUTE", send(fd, "d", 1, MSG_DONTROUTE));
  show("MSG_EOR", send(fd, "e", 1, MSG_EOR));
  show("MSG_PROBE", send(fd, "p", 1, MSG_PROBE));
  show("MSG_FASTOPEN, connected", send(fd, "f", 1, MSG_FASTOPEN));
  show("MSG_FASTOPEN with the address",
       sendto(fd, "f", 1, MSG_FASTOPEN, (struct sockaddr*)&pair->address, pair->address_size));
  show("MSG_MORE", send(fd, "more ", 5, MSG_MORE));
  show("and more", send(fd, "and ", 4, MSG_MORE));
  show("the last", send(fd, "last.", 5, 0));
  show("TCP_CORK", setsockopt(fd, IPPROTO_TCP, TCP_CORK, &(int){1}, sizeof(int)));
  show("corked", send(fd, "cork", 4, 0));
  show("corked", send(fd, "ed", 2, 0));
  show("uncorked", setsockopt(fd, IPPROTO_TCP, TCP_CORK, &(int){0}, sizeof(int)));
  show("left in MSG_MORE", send(fd, "!", 1, MSG_MORE));
  CHECKED(shutdown(fd, SHUT_WR)); /* which sends it */
  show("rest", recv(fd, text, sizeof(text), MSG_WAITALL));
}

static void several_messages(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  char text[4][8];
  struct iovec parts[4];
  struct mmsghdr messages[4];
  memset(messages, 0, sizeof(messages));
  for (int i = 0; i < 4; ++i) {
    parts[i] = (struct iovec){text[i], 4};
    messages[i].msg_hdr = (struct msghdr){.msg_iov = &parts[i], .msg_iovlen = 1};
  }
  struct timespec none = {0, 0}, bad = {0, -1}, some = {5, 0};
  tell(pair);
  await(pair);
  settle();
  show("no time", recvmmsg(fd, messages, 4, 0, &none)); /* one is taken, then time is up */
  show("MSG_WAITFORONE", recvmmsg(fd, messages, 4, MSG_WAITFORONE, NULL));
  say("lengths %u %u", messages[0].msg_len, messages[1].msg_len);
  show("bad time", recvmmsg(fd, messages, 4, 0, &bad));
  tell(pair);
  show("in time", recvmmsg(fd, messages, 2, MSG_WAITALL, &some));
  say("time left: %d", some.tv_sec == 4 && some.tv_nsec > 0);
  show("of none", recvmmsg(fd, messages, 0, 0, NULL));
  show("nothing there", recvmmsg(fd, messages, 4, MSG_DONTWAIT, NULL));
}

static void answers(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  bool one = strcmp(pair->variant, "calls_for_nothing") == 0;
  CHECKED(send(pair->stream, "0123456789abcdef", one ? 1 : 16, 0));
  tell(pair);
  if (strcmp(pair->variant, "several_messages") == 0) {
    await(pair);
    CHECKED(send(pair->stream, "01234567", 8, 0));
    drain("drained", pair->stream);
    return;
  }
  char text[64] = "";
  ssize_t got = recv(pair->stream, text, sizeof(text), MSG_WAITALL);
  show("to the end", got);
  if (got > 0) say("text: %.*s", (int)got, text);
}

/* connect and send in one; over loopback the kernel may or may not use a cookie. */
static void fast_opens(struct Pair* pair) {
  learn_address(pair);
  int fd = (int)CHECKED(socket(AF_INET, SOCK_STREAM, 0));
  struct msghdr message = {.msg_iov = &(struct iovec){"hello", 5}, .msg_iovlen = 1,
                           .msg_name = &pair->address, .msg_namelen = pair->address_size};
  if (strstr(pair->variant, "sendmsg") != NULL) {
    show("sendmsg", sendmsg(fd, &message, MSG_FASTOPEN));
  } else if (strstr(pair->variant, "option") != NULL) {
    show("TCP_FASTOPEN_CONNECT", setsockopt(fd, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, &(int){1}, sizeof(int)));
    show("connect", connect(fd, (struct sockaddr*)&pair->address, pair->address_size));
    show("send", send(fd, "hello", 5, 0));
  } else {
    show("sendto", sendto(fd, "hello", 5, MSG_FASTOPEN, (struct sockaddr*)&pair->address, pair->address_size));
  }
  warm_up_as_client(fd);
  show("EISCONN", connect(fd, (struct sockaddr*)&pair->address, pair->address_size));
  CHECKED(shutdown(fd, SHUT_WR));
  drain("drained", fd);
}

static void accepts_fast(struct Pair* pair) {
  char text[8] = "";
  open_cold_stream(pair);
  show("first bytes", recv(pair->stream, text, 5, MSG_WAITALL));
  say("text: %s", text);
  warm_up_as_server(pair->stream);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"calls_for_nothing", answers, calls_for_nothing, true},
    {"odd_flags", odd_flags, answers, true},
    {"several_messages", answers, several_messages, true},
    {"fast_open_sendto", accepts_fast, fast_opens, true},
    {"fast_open_sendmsg", accepts_fast, fast_opens, true},
    {"fast_open_option", accepts_fast, fast_opens, true},
};
PAIR_MAIN(kCases)
