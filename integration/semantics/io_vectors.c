/* readv, writev, preadv2, pwritev2, recvmsg, sendmsg, recvmmsg and sendmmsg with many parts. */
#include "pair.h"

enum { kParts = 1024, kPartBytes = 37, kTotal = kParts * kPartBytes };

static uint8_t storage[2 * kTotal];

/* Parts of uneven sizes, some of them empty, over `storage`. */
static int cut(struct iovec* parts, int count, size_t total) {
  size_t at = 0;
  for (int i = 0; i < count; ++i) {
    size_t size = i % 5 == 3 ? 0 : (size_t)(i * 7 % 90);
    if (size > total - at) size = total - at;
    if (i == count - 1) size = total - at;
    parts[i].iov_base = storage + at;
    parts[i].iov_len = size;
    at += size;
  }
  return count;
}

/* Moves exactly `total` bytes with a call that may move a part; the parts are cut anew each time.
 */
enum Call { kWritev, kPwritev2, kSendmsg, kReadv, kPreadv2, kRecvmsg };

static void move_all(int fd, enum Call call, size_t total) {
  struct iovec parts[kParts];
  bool out = call <= kSendmsg;
  for (size_t done = 0; done < total;) {
    int count = cut(parts, kParts, total - done);
    if (out) fill_pattern(storage, total - done, done);
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)count};
    ssize_t n = call == kWritev     ? writev(fd, parts, count)
                : call == kPwritev2 ? pwritev2(fd, parts, count, -1, 0)
                : call == kSendmsg  ? sendmsg(fd, &message, MSG_NOSIGNAL)
                : call == kReadv    ? readv(fd, parts, count)
                : call == kPreadv2  ? preadv2(fd, parts, count, -1, 0)
                                    : recvmsg(fd, &message, 0);
    if (n <= 0) fail("call %d: %zd errno %d after %zu", call, n, errno, done);
    if (!out && !pattern_holds(storage, (size_t)n, done)) fail("call %d damaged data", call);
    done += (size_t)n;
  }
  say("call %d: %zu bytes intact", call, total);
}

static void many_out(struct Pair* pair) {
  open_stream(pair);
  move_all(pair->stream, kWritev, kTotal);
  await(pair);
  move_all(pair->stream, kPwritev2, kTotal);
  await(pair);
  move_all(pair->stream, kSendmsg, kTotal);
  await(pair);
}

static void many_in(struct Pair* pair) {
  open_stream(pair);
  move_all(pair->stream, kReadv, kTotal);
  tell(pair);
  move_all(pair->stream, kPreadv2, kTotal);
  tell(pair);
  move_all(pair->stream, kRecvmsg, kTotal);
  tell(pair);
}

static void mmsg_out(struct Pair* pair) {
  open_stream(pair);
  struct iovec parts[8];
  struct mmsghdr messages[8];
  memset(messages, 0, sizeof(messages));
  fill_pattern(storage, 800, 0);
  for (int i = 0; i < 8; ++i) {
    parts[i] = (struct iovec){storage + 100 * i, 100};
    messages[i].msg_hdr.msg_iov = &parts[i];
    messages[i].msg_hdr.msg_iovlen = 1;
  }
  show("sendmmsg", sendmmsg(pair->stream, messages, 8, 0));
  say("lengths: %u %u", messages[0].msg_len, messages[7].msg_len);
  show("sendmmsg of none", sendmmsg(pair->stream, messages, 0, 0));
  tell(pair);
  await(pair);
}

static void mmsg_in(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  settle();
  struct iovec parts[8];
  struct mmsghdr messages[8];
  memset(messages, 0, sizeof(messages));
  for (int i = 0; i < 8; ++i) {
    parts[i] = (struct iovec){storage + 300 * i, 300};
    messages[i].msg_hdr.msg_iov = &parts[i];
    messages[i].msg_hdr.msg_iovlen = 1;
  }
  show("recvmmsg", recvmmsg(pair->stream, messages, 8, MSG_DONTWAIT, NULL));
  say("lengths: %u %u %u", messages[0].msg_len, messages[1].msg_len, messages[2].msg_len);
  say("intact: %d", pattern_holds(storage, 800, 0));
  show("recvmmsg of nothing", recvmmsg(pair->stream, messages, 8, MSG_DONTWAIT, NULL));
  tell(pair);
}

/* The timestamps and names that a stream socket does not give. */
static void odd_out(struct Pair* pair) {
  open_stream(pair);
  struct iovec parts[2] = {{"hello", 5}, {" world", 6}};
  struct sockaddr_in ignored = {.sin_family = AF_INET, .sin_port = 1};
  struct msghdr message = {
      .msg_iov = parts, .msg_iovlen = 2, .msg_name = &ignored, .msg_namelen = sizeof(ignored)};
  show("sendmsg with a name", sendmsg(pair->stream, &message, 0));
  show("sendto with a name", sendto(pair->stream, "!", 1, 0, (void*)&ignored, sizeof(ignored)));
  message.msg_name = NULL;
  message.msg_namelen = 0;
  message.msg_iovlen = 1025;
  show("too many parts", sendmsg(pair->stream, &message, 0));
  show("writev of too many", writev(pair->stream, parts, 1025));
  show("writev of -1", writev(pair->stream, parts, -1));
  show("writev of none", writev(pair->stream, parts, 0));
  show("pwrite", pwrite(pair->stream, "x", 1, 0));
  show("lseek", lseek(pair->stream, 0, SEEK_CUR));
  show("ftruncate", ftruncate(pair->stream, 0));
  show("fsync", fsync(pair->stream));
  tell(pair);
  await(pair);
}

static void odd_in(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  settle();
  char text[64], control[64];
  struct sockaddr_in from;
  memset(&from, 0x55, sizeof(from));
  struct iovec part = {text, sizeof(text)};
  struct msghdr message = {.msg_iov = &part,
                           .msg_iovlen = 1,
                           .msg_name = &from,
                           .msg_namelen = sizeof(from),
                           .msg_control = control,
                           .msg_controllen = sizeof(control),
                           .msg_flags = -1};
  show("recvmsg", recvmsg(pair->stream, &message, 0));
  say("name %u control %zu flags 0x%x", message.msg_namelen, message.msg_controllen,
      message.msg_flags);
  say("text: %.12s", text);
  socklen_t size = sizeof(from);
  show("recvfrom", recvfrom(pair->stream, text, 1, MSG_DONTWAIT, (void*)&from, &size));
  show("pread", pread(pair->stream, text, 1, 0));
  show("readv of none", readv(pair->stream, &part, 0));
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"many_to_server", many_in, many_out, true},
    {"many_to_client", many_out, many_in, true},
    {"mmsg_to_server", mmsg_in, mmsg_out, true},
    {"mmsg_to_client", mmsg_out, mmsg_in, true},
    {"odd", odd_in, odd_out, true},
};
PAIR_MAIN(kCases)
