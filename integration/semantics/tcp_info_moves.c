/* TCP_INFO counts the program's bytes, whatever carries them: a program that looks at the counts to see
 * progress (a proxy, a benchmark, a watchdog) sees it. */
#include <linux/tcp.h>
#include <stddef.h>
/* netinet/tcp.h knows a shorter structure, and excludes the other header. */
#define _NETINET_TCP_H 1
#include "pair.h"

enum { kBytes = 300000 };

static struct tcp_info info_of(int fd) {
  struct tcp_info info;
  memset(&info, 0, sizeof(info));
  socklen_t size = sizeof(info);
  CHECKED(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size));
  return info;
}

static void show_moved(const char* label, const struct tcp_info* before, const struct tcp_info* after) {
  say("%s: sent %llu, acknowledged %llu, received %llu", label,
      (unsigned long long)(after->tcpi_bytes_sent - before->tcpi_bytes_sent - after->tcpi_bytes_retrans +
                           before->tcpi_bytes_retrans),
      (unsigned long long)(after->tcpi_bytes_acked - before->tcpi_bytes_acked),
      (unsigned long long)(after->tcpi_bytes_received - before->tcpi_bytes_received));
}

static void first(struct Pair* pair) {
  open_stream(pair);
  settle(); /* the last acknowledgement may be a delayed one */
  struct tcp_info at_first = info_of(pair->stream);
  send_pattern(pair->stream, kBytes, 0);
  await(pair); /* all is read there */
  struct tcp_info after = info_of(pair->stream);
  show_moved("sent", &at_first, &after);
  tell(pair);
  await(pair);
  settle();
  after = info_of(pair->stream);
  show_moved("1000 came, unread", &at_first, &after);
  receive_pattern(pair->stream, 1000, 0);
  after = info_of(pair->stream);
  show_moved("read", &at_first, &after);
  /* whoever knows a shorter structure gets that, and nothing behind it */
  struct {
    char part[offsetof(struct tcp_info, tcpi_bytes_acked)];
    uint64_t behind;
  } shorter;
  shorter.behind = 0x5555555555555555u;
  socklen_t size = sizeof(shorter.part) + 4;
  show("getsockopt", getsockopt(pair->stream, IPPROTO_TCP, TCP_INFO, &shorter, &size));
  say("size %u, rest untouched %d", size, shorter.behind >> 32 == 0x55555555u);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
  after = info_of(pair->stream);
  say("all acknowledged: %d", after.tcpi_bytes_acked - at_first.tcpi_bytes_acked >= kBytes);
}

static void second(struct Pair* pair) {
  open_stream(pair);
  receive_pattern(pair->stream, kBytes, 0);
  settle();
  tell(pair);
  await(pair);
  send_pattern(pair->stream, 1000, 0);
  settle();
  tell(pair);
  drain("drained", pair->stream);
}

/* What happens before there is anything to tell. */
static void nothing(struct Pair* pair) { (void)pair; }

static void unconnected(struct Pair* pair) {
  (void)pair;
  int fd = (int)CHECKED(socket(AF_INET, SOCK_STREAM, 0));
  struct tcp_info info = info_of(fd);
  say("state %d, sent %llu", info.tcpi_state, (unsigned long long)info.tcpi_bytes_sent);
  socklen_t size = 0;
  show("of no bytes", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size));
  say("size %u", size);
}

static const struct PairCase kCases[] = {
    {"server_asks", first, second, true},
    {"client_asks", second, first, true},
    {"unconnected", nothing, unconnected, false},
};
PAIR_MAIN(kCases)
