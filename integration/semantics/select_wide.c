/* select with nfds as large as the descriptor limit and sets of the usual 128 bytes, as programs
 * from before poll have it. Linux looks at no more bits than the process has room for descriptors:
 * what lies behind the sets is neither read nor written. */
#include <sys/mman.h>
#include <sys/resource.h>

#include "pair.h"

/* The last 128 bytes before memory that must not be touched. */
static fd_set* set_at_the_edge(void) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  char* memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("mmap");
  CHECKED(mprotect(memory + page, page, PROT_NONE));
  return (fd_set*)(memory + page - sizeof(fd_set));
}

static void select_wide(const char* label, int fd, fd_set* in, int nfds) {
  FD_ZERO(in);
  FD_SET(fd, in);
  show(label, select(nfds, in, NULL, NULL, &(struct timeval){0, 0}));
  say("  in %d", FD_ISSET(fd, in));
  struct timespec limit = {0, 0};
  FD_ZERO(in);
  FD_SET(fd, in);
  show("pselect", pselect(nfds, in, NULL, NULL, &limit, NULL));
}

static void waiter(struct Pair* pair) {
  struct rlimit limit;
  CHECKED(getrlimit(RLIMIT_NOFILE, &limit));
  int nfds = limit.rlim_cur > 60000 ? 60000 : (int)limit.rlim_cur;
  open_stream(pair);
  fd_set* in = set_at_the_edge();
  select_wide("nothing", pair->stream, in, nfds);
  tell(pair);
  await(pair);
  settle();
  select_wide("data", pair->stream, in, nfds);
  receive_pattern(pair->stream, 100, 0);
  /* a descriptor of the program's own beyond 1,024 makes room for the bits up to there */
  if (nfds > 5000) {
    static unsigned long bits[8192 / 64];
    int high = (int)CHECKED(fcntl(pair->control, F_DUPFD, 3000));
    bits[high / 64] |= 1ul << (high % 64);
    show("a high one", select(nfds, NULL, (fd_set*)bits, NULL, &(struct timeval){0, 0}));
    bits[high / 64] = 0;
    bits[3500 / 64] |= 1ul << (3500 % 64);
    show("a closed one", select(nfds, (fd_set*)bits, NULL, NULL, &(struct timeval){0, 0}));
    close(high);
  }
  close(pair->control);
  pair->control = -1;
}

static void peer(struct Pair* pair) {
  open_stream(pair);
  await(pair);
  send_pattern(pair->stream, 100, 0);
  tell(pair);
  recv(pair->control, &(char){0}, 1, 0);
}

static const struct PairCase kCases[] = {
    {"server_waits", waiter, peer, true},
    {"client_waits", peer, waiter, true},
};
PAIR_MAIN(kCases)
