/* MSG_ZEROCOPY: each send has a number, and its completion comes on the error queue, with POLLERR until
 * it is fetched. Over loopback the kernel copies in the end, and says so. */
#include <time.h>

#include <linux/errqueue.h>

#include "pair.h"

enum { kBytes = 30000, kSends = 5 };

static void enable(int fd, int on) {
  show("SO_ZEROCOPY", setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof(on)));
  int now = -1;
  socklen_t size = sizeof(now);
  show("getsockopt", getsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &now, &size));
  say("SO_ZEROCOPY: %d", now);
}

/* Everything that is on the queue now: how many sends it covers, from which number on. */
static void completions(const char* label, int fd) {
  unsigned covered = 0, first = ~0u, last = 0, copied = 0, messages = 0;
  for (;;) {
    char control[128];
    struct msghdr message = {.msg_control = control, .msg_controllen = sizeof(control)};
    long result = recvmsg(fd, &message, MSG_ERRQUEUE);
    if (result < 0) {
      if (errno != EAGAIN) show("recvmsg", result);
      break;
    }
    ++messages;
    struct cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header == NULL) fail("no control message");
    if (header->cmsg_level != SOL_IP || header->cmsg_type != IP_RECVERR) {
      say("control message %d %d", header->cmsg_level, header->cmsg_type);
    }
    struct sock_extended_err error;
    memcpy(&error, CMSG_DATA(header), sizeof(error));
    if (result != 0 || message.msg_flags != MSG_ERRQUEUE || error.ee_errno != 0 ||
        error.ee_origin != SO_EE_ORIGIN_ZEROCOPY) {
      say("result %ld flags %x errno %u origin %d length %zu", result, message.msg_flags,
          error.ee_errno, error.ee_origin, (size_t)header->cmsg_len);
    }
    covered += error.ee_data - error.ee_info + 1;
    if (error.ee_info < first) first = error.ee_info;
    if (error.ee_data > last) last = error.ee_data;
    copied += error.ee_code == SO_EE_CODE_ZEROCOPY_COPIED;
  }
  say("%s: %u sends", label, covered);
  if (covered != 0) say("  numbers %u to %u, all copied %d", first, last, copied == messages);
}

static void show_poll(const char* label, int fd) {
  struct pollfd one = {fd, POLLIN, 0};
  show(label, poll(&one, 1, 0));
  show_events("  says", one.revents);
}

static void sender(struct Pair* pair) {
  static uint8_t block[kBytes];
  struct sockaddr_in6 from;
  open_stream(pair);
  int fd = pair->stream;
  fill_pattern(block, sizeof(block), 0);
  show("MSG_ZEROCOPY, not enabled", send(fd, block, sizeof(block), MSG_ZEROCOPY));
  settle();
  completions("none", fd);
  enable(fd, 2);
  enable(fd, 1);
  uint64_t carried = tcp_carried(fd);
  show_poll("at first", fd);
  show("an ordinary send", send(fd, block, sizeof(block), 0));
  int epoll = (int)CHECKED(epoll_create1(0));
  struct epoll_event event = {.events = EPOLLIN | EPOLLET};
  CHECKED(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
  show("epoll, nothing", epoll_wait(epoll, &event, 1, 0));
  for (int i = 0; i < kSends; ++i) show("MSG_ZEROCOPY", send(fd, block, sizeof(block), MSG_ZEROCOPY));
  show("epoll", epoll_wait(epoll, &event, 1, 1000));
  show_epoll("  says", event.events);
  settle();
  show_poll("completed", fd);
  completions("completions", fd);
  show_poll("fetched", fd);
  struct iovec parts[2] = {{block, 10000}, {block + 10000, 20000}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
  show("sendmsg", sendmsg(fd, &message, MSG_ZEROCOPY));
  show("of nothing", send(fd, block, 0, MSG_ZEROCOPY));
  show("one byte", send(fd, "x", 1, MSG_ZEROCOPY | MSG_DONTWAIT));
  settle();
  int error = -1;
  socklen_t size = sizeof(error);
  CHECKED(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
  say("SO_ERROR: %d", error);
  size = sizeof(from);
  char byte;
  show("recvfrom MSG_ERRQUEUE", recvfrom(fd, &byte, 1, MSG_ERRQUEUE, (struct sockaddr*)&from, &size));
  completions("the rest", fd);
  show_lifted("while all this", fd, carried);
  tell(pair);
  drain("drained", fd);
}

static void receiver(struct Pair* pair) {
  open_stream(pair);
  for (int i = 0; i < 2 + kSends + 1; ++i) receive_pattern(pair->stream, kBytes, 0);
  char byte = 0;
  show("one more", recv(pair->stream, &byte, 1, MSG_WAITALL));
  say("intact");
  await(pair);
}

static void enabled_first(struct Pair* pair) {
  learn_address(pair);
  int fd = pair->stream = (int)CHECKED(socket(AF_INET, SOCK_STREAM, 0));
  enable(fd, 1);
  CHECKED(connect(fd, (struct sockaddr*)&pair->address, pair->address_size));
  static uint8_t block[kBytes];
  fill_pattern(block, sizeof(block), 0);
  show("over TCP", send(fd, block, sizeof(block), MSG_ZEROCOPY));
  warm_up_as_client(fd);
  show("lifted", send(fd, block, sizeof(block), MSG_ZEROCOPY));
  settle();
  completions("both", fd);
  tell(pair);
  drain("drained", fd);
}

static void receives_both(struct Pair* pair) {
  open_cold_stream(pair);
  receive_pattern(pair->stream, kBytes, 0);
  warm_up_as_server(pair->stream);
  receive_pattern(pair->stream, kBytes, 0);
  await(pair);
}

static const struct PairCase kCases[] = {
    {"client_sends", receiver, sender, true},
    {"server_sends", sender, receiver, true},
    {"enabled_first", receives_both, enabled_first, true},
};
PAIR_MAIN(kCases)
