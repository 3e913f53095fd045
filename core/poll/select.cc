// select and pselect, as poll over the same descriptors. The bits follow fs/select.c.

#include <memory>
#include <new>

#include "core/base/try_copy.h"
#include "core/poll/poll_set.h"
#include "core/poll/readiness_ops.h"
#include "core/stream/stream.h"

namespace rsock::poll {
namespace {

using stream::FdTable;

constexpr short kInSet = POLLRDNORM | POLLRDBAND | POLLIN | POLLHUP | POLLERR;
constexpr short kOutSet = POLLWRBAND | POLLWRNORM | POLLOUT | POLLERR;
constexpr short kExSet = POLLPRI;

bool has(const fd_set* set, int fd) noexcept {
  // Not FD_ISSET: its fortified form aborts, and Linux's select takes sets larger than fd_set.
  return set != nullptr &&
         (reinterpret_cast<const unsigned long*>(set)[fd / 64] >> (fd % 64) & 1) != 0;
}
void put(fd_set* set, int fd, bool on) noexcept {
  if (set == nullptr) return;
  auto& word = reinterpret_cast<unsigned long*>(set)[fd / 64];
  const unsigned long bit = 1ul << (fd % 64);
  word = on ? word | bit : word & ~bit;
}

/// check(set, bytes) of each: the kernel looks at whole words of the first nfds bits.
template <typename Set, typename Check>
bool all_sets(int nfds, Set* r, Set* w, Set* e, Check check) noexcept {
  const size_t bytes = (static_cast<size_t>(nfds) + 63) / 64 * 8;
  for (Set* set : {r, w, e}) {
    if (set != nullptr && !check(set, bytes)) return false;
  }
  return true;
}

/// Does the set hold anything that is ours?
bool anything_ours(int nfds, const fd_set* r, const fd_set* w, const fd_set* e) noexcept {
  for (int fd = 0; fd < nfds; ++fd) {
    if (FdTable::word(fd) != 0 && (has(r, fd) || has(w, fd) || has(e, fd))) return true;
  }
  return false;
}

size_t gather(int nfds, const fd_set* r, const fd_set* w, const fd_set* e, pollfd* out) noexcept {
  size_t n = 0;
  for (int fd = 0; fd < nfds; ++fd) {
    short events = 0;
    if (has(r, fd)) events |= POLLIN | POLLRDNORM | POLLRDBAND;
    if (has(w, fd)) events |= POLLOUT | POLLWRNORM | POLLWRBAND;
    if (has(e, fd)) events |= POLLPRI;
    if (events != 0) out[n++] = pollfd{fd, events, 0};
  }
  return n;
}

long scatter(const pollfd* fds, size_t n, fd_set* r, fd_set* w, fd_set* e) noexcept {
  long count = 0;
  for (size_t i = 0; i < n; ++i) {
    if ((fds[i].revents & POLLNVAL) != 0) return -EBADF;
  }
  for (size_t i = 0; i < n; ++i) {
    const int fd = fds[i].fd;
    const bool in = has(r, fd) && (fds[i].revents & kInSet) != 0;
    const bool out = has(w, fd) && (fds[i].revents & kOutSet) != 0;
    const bool ex = has(e, fd) && (fds[i].revents & kExSet) != 0;
    put(r, fd, in);
    put(w, fd, out);
    put(e, fd, ex);
    count += in + out + ex;
  }
  return count;
}

}  // namespace

long select(int nfds, fd_set* read, fd_set* write, fd_set* except, const timespec* timeout,
            timespec* remaining, const sigset_t* sigmask, KernelCall kernel) {
  if (!may_matter() || nfds <= 0 || nfds > FdTable::kSize ||
      !all_sets(nfds, read, write, except, readable) ||  // the kernel says EFAULT
      !anything_ours(nfds, read, write, except)) {
    return kernel();
  }
  constexpr int kInline = 64;
  pollfd few[kInline];
  std::unique_ptr<pollfd[]> many;
  pollfd* fds = few;
  if (nfds > kInline) {
    many.reset(new (std::nothrow) pollfd[static_cast<size_t>(nfds)]);
    if (!many) return -ENOMEM;
    fds = many.get();
  }
  const size_t n = gather(nfds, read, write, except, fds);
  const Deadline deadline = Deadline::from_timeout(timeout);
  bool used_kernel = false;
  const long r = poll_set(fds, n, deadline, sigmask, kernel, &used_kernel);
  if (used_kernel) return r;  // the program's own select did it all
  if (remaining != nullptr && timeout != nullptr) {
    const uint64_t left = deadline.remaining_ns();
    *remaining = {static_cast<time_t>(left / 1'000'000'000u),
                  static_cast<long>(left % 1'000'000'000u)};
  }
  if (r < 0) return r;
  if (!all_sets(nfds, read, write, except, writable)) return -EFAULT;
  return scatter(fds, n, read, write, except);
}

}  // namespace rsock::poll
