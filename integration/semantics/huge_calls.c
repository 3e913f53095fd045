/* One call for more than 2 GiB: Linux cuts it down to 2 GiB less a page (MAX_RW_COUNT in fs/read_write.c)
 * and moves that. */
#include <sys/mman.h>
#include <sys/syscall.h>

#include "pair.h"

static const size_t kHuge = (size_t)5 << 29; /* 2.5 GiB */
enum { kWindow = 1 << 20 };

/* Memory of that size that is one window of a file again and again: it costs no more than that. */
static char* huge_memory(bool writable) {
  char* at = mmap(NULL, kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) fail("mmap");
  int file = (int)CHECKED(memfd_create("window", MFD_CLOEXEC));
  CHECKED(ftruncate(file, kWindow));
  for (size_t i = 0; i < kHuge; i += kWindow) {
    int how = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    if (mmap(at + i, kWindow, how, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) fail("mmap of a window");
  }
  CHECKED(close(file));
  return at;
}

static bool has(const struct Pair* pair, const char* word) { return strstr(pair->variant, word) != NULL; }

static void sends(struct Pair* pair) {
  char* memory = huge_memory(false);
  open_stream(pair);
  struct iovec parts[2] = {{memory, kHuge / 2}, {memory + kHuge / 2, kHuge / 2}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
  if (has(pair, "not_waiting")) {
    ssize_t n = send(pair->stream, memory, kHuge, MSG_DONTWAIT);
    say("a part: %d", n > 0 && n < 0x7ffff000);
    CHECKED(send(pair->control, &n, sizeof(n), 0));
    await(pair);
    parts[0].iov_len = PTRDIFF_MAX;
    show("too much in all", sendmsg(pair->stream, &message, 0));
    return;
  }
  long n = has(pair, "writev")    ? writev(pair->stream, parts, 2)
           : has(pair, "sendmsg") ? sendmsg(pair->stream, &message, MSG_NOSIGNAL)
                                  : send(pair->stream, memory, kHuge, MSG_NOSIGNAL);
  show("sent", n);
  await(pair);
}

static void receives(struct Pair* pair) {
  open_stream(pair);
  if (has(pair, "not_waiting")) {
    static char buffer[kWindow];
    ssize_t expected = 0;
    CHECKED(recv(pair->control, &expected, sizeof(expected), 0));
    while (expected > 0) {
      ssize_t n = CHECKED(recv(pair->stream, buffer, sizeof(buffer), 0));
      expected -= n;
    }
    show("over", expected);
    tell(pair);
    return;
  }
  char* memory = huge_memory(true);
  show("received", recv(pair->stream, memory, kHuge, MSG_WAITALL));
  show("no more", recv(pair->stream, memory, kHuge, MSG_DONTWAIT));
  tell(pair);
}

static const struct PairCase kCases[] = {
    {"send", receives, sends, true},
    {"writev", sends, receives, true},
    {"not_waiting", receives, sends, true},
};
PAIR_MAIN(kCases)
