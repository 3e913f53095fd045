#include "core/transport/shm/page_lane.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>

#include "core/base/raw_syscall.h"
#include "core/base/thread_signals.h"
#include "core/base/try_copy.h"
#include "core/os/os.h"

namespace rsock::transport {
namespace {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;

constexpr size_t kPage = 4096;
/// Lanes of this process, at most: a descriptor each.
constexpr int kMostLanes = 256;
constinit std::atomic<int> g_lanes{0};
/// Asked of the kernel, which gives what net.core.wmem_max allows, or all of it to root.
constexpr int kBuffer = 1 << 20;

/// Who has the other end has to be the doorbell's peer: 0 is any process of a pid namespace that we
/// don't see. And where the kernel is too old to keep descriptors off our sockets (6.16), it may
/// let one end stop the other: a receive throws away what was passed, which takes as long as that
/// socket's SO_LINGER says, and before 6.5 sendfile shares a lock with the reader. There only
/// somebody who can stop us anyhow will do.
bool is_welcome(int lane, int doorbell, bool hardened) noexcept {
  ucred a{};
  ucred b{};
  socklen_t len = sizeof(a);
  return os::getsockopt(lane, SOL_SOCKET, SO_PEERCRED, &a, &len) &&
         os::getsockopt(doorbell, SOL_SOCKET, SO_PEERCRED, &b, &len) && a.pid == b.pid &&
         a.uid == b.uid && a.pid != 0 &&
         (hardened || a.uid == 0 || a.uid == static_cast<uid_t>(os::geteuid()));
}

/// Among those that this process may have.
bool take_place() noexcept {
  if (g_lanes.fetch_add(1, memory_order_relaxed) < kMostLanes) return true;
  g_lanes.fetch_sub(1, memory_order_relaxed);
  return false;
}

Result<os::OwnedFd> lane_socket() noexcept {
  return os::make_internal(
      [] { return os::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
}

/// [from, from + n) of the ring's positions, as one piece of memory or two.
template <typename Fn>
bool each_piece(std::byte* ring, size_t ring_size, uint64_t from, size_t n, Fn fn) noexcept {
  const size_t at = from & (ring_size - 1);
  const size_t first = std::min(n, ring_size - at);
  return fn(ring + at, first, size_t{0}) && (first == n || fn(ring, n - first, first));
}

/// A file that was cut gives SIGBUS, and a fault whose signal is blocked (the keeper blocks all)
/// ends the process instead of reaching the handler that makes try_copy() say so.
class FaultsUnblocked {
 public:
  FaultsUnblocked() noexcept {
    const uint64_t bus = uint64_t{1} << (SIGBUS - 1);
    raw_syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, reinterpret_cast<long>(&bus),
                reinterpret_cast<long>(&before_), sizeof(bus));
  }
  ~FaultsUnblocked() { set_signal_mask(before_, nullptr); }
  FaultsUnblocked(const FaultsUnblocked&) = delete;
  FaultsUnblocked& operator=(const FaultsUnblocked&) = delete;

 private:
  uint64_t before_ = 0;
};

/// sendfile() where nobody may be there to read: the program has not sent there, so it gets no
/// SIGPIPE.
Result<size_t> send_pages(int out, int file, off_t offset, size_t n) noexcept {
  constexpr uint64_t kPipe = uint64_t{1} << (SIGPIPE - 1);
  uint64_t before = 0;
  uint64_t pending = 0;
  raw_syscall(SYS_rt_sigprocmask, SIG_BLOCK, reinterpret_cast<long>(&kPipe),
              reinterpret_cast<long>(&before), sizeof(kPipe));
  if ((before & kPipe) != 0) {  // the program's own may wait already
    raw_syscall(SYS_rt_sigpending, reinterpret_cast<long>(&pending), sizeof(pending));
  }
  const auto sent = os::sendfile(out, file, offset, n);
  // A call that moved something tells nobody of an EPIPE behind it, but the signal is there.
  if ((!sent || *sent < n) && (pending & kPipe) == 0) os::forget_sigpipe();
  if ((before & kPipe) == 0) set_signal_mask(before, nullptr);
  return sent;
}

}  // namespace

PageSender::~PageSender() {
  let_go_below(UINT64_MAX);
  if (listener_ || out_) g_lanes.fetch_sub(1, memory_order_relaxed);
}

bool PageSender::offer(const wire::SocketName& name) noexcept {
  if (out_ || refused_) return false;
  if (listener_) return true;
  refused_ = true;  // until it is there
  if (!take_place()) return false;
  auto listener = lane_socket();
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(name, &address);
  if (!listener || !os::bind(listener->get(), reinterpret_cast<sockaddr*>(&address), len) ||
      !os::listen(listener->get(), 1)) {
    g_lanes.fetch_sub(1, memory_order_relaxed);
    return false;
  }
  listener_ = std::move(*listener);
  refused_ = false;
  return true;
}

bool PageSender::accept_peer(int doorbell) noexcept {
  auto out = os::make_internal(
      [&] { return os::accept4(listener_.get(), SOCK_CLOEXEC | SOCK_NONBLOCK); });
  if (!out && out.error() == EAGAIN) return false;
  listener_.reset();
  if (out) out_ = make_lane(std::move(*out), doorbell);
  if (out_) return true;
  refused_ = true;
  g_lanes.fetch_sub(1, memory_order_relaxed);
  return false;
}

os::OwnedFd PageSender::make_lane(os::OwnedFd out, int doorbell) noexcept {
  // Nothing is received there: it tells what the kernel can.
  if (!is_welcome(out.get(), doorbell, os::refuse_descriptors(out.get()))) return {};
  if (!os::setsockopt(out.get(), SOL_SOCKET, SO_SNDBUFFORCE, &kBuffer, sizeof(kBuffer))) {
    (void)os::setsockopt(out.get(), SOL_SOCKET, SO_SNDBUF, &kBuffer, sizeof(kBuffer));
  }
  // What is passed is charged with its size (unix_stream_sendmsg() in net/unix/af_unix.c).
  const auto buffer = os::getsockopt_int(out.get(), SOL_SOCKET, SO_SNDBUF);
  if (!buffer || static_cast<size_t>(*buffer) < kLeast) return {};
  capacity_ = static_cast<size_t>(*buffer);
  return out;
}

void PageSender::let_go_below(uint64_t head) noexcept {
  for (; first_ != count_ && held_[first_ % wire::kPageSpans].end <= head; ++first_) {
    const Held& held = held_[first_ % wire::kPageSpans];
    os::unmap(held.map, held.map_size);
  }
}

size_t PageSender::pass(int file, off_t offset, size_t limit, uint64_t tail,
                        uint64_t head) noexcept {
  let_go_below(head);
  if (count_ - first_ == wire::kPageSpans) return 0;
  const auto size = os::file_size(file);
  if (!size || *size <= offset) return 0;
  limit = std::min({limit, capacity_, static_cast<size_t>(*size - offset)});
  if (limit < kLeast) return 0;
  // The direction is locked: not where a disk is to be waited for. Readahead goes forward, so what
  // the last byte says holds for the others too, nearly always.
  char byte;
  const auto last = os::pread_cached(file, &byte, 1, offset + static_cast<off_t>(limit) - 1);
  if (!last || *last == 0) return 0;
  // For restore(): the mapping keeps the file, as a descriptor would; but closing one would drop the
  // program's record locks on the file (fcntl(2), F_SETLK).
  const size_t skip = static_cast<size_t>(offset) % kPage;
  const size_t map_size = skip + limit;
  const auto map = os::map_file(file, offset - static_cast<off_t>(skip), map_size);
  if (!map) return 0;
  const auto passed = send_pages(out_.get(), file, offset, limit);
  if (!passed || *passed == 0) {
    os::unmap(*map, map_size);
    return 0;
  }
  wire::PageSpan& slot = spans_[count_ % wire::kPageSpans];
  slot.begin.store(tail, memory_order_relaxed);
  slot.end.store(tail + *passed, memory_order_relaxed);
  held_[count_ % wire::kPageSpans] = {tail, tail + *passed, static_cast<std::byte*>(*map), map_size,
                                      skip};
  // release pairs with PageReceiver::pending(). The tail that covers the bytes follows.
  words_.spans.store(++count_, memory_order_release);
  return *passed;
}

bool PageSender::restore(uint64_t from, std::byte* ring, size_t ring_size) noexcept {
  const FaultsUnblocked unblocked;
  for (uint64_t k = first_; k != count_; ++k) {
    const Held& held = held_[k % wire::kPageSpans];
    if (held.end <= from) continue;
    const uint64_t begin = std::max(held.begin, from);
    const std::byte* const bytes = held.map + held.skip + (begin - held.begin);
    if (!each_piece(ring, ring_size, begin, held.end - begin,
                    [bytes](std::byte* to, size_t n, size_t done) {
                      return try_copy(to, bytes + done, n);
                    })) {
      return false;
    }
  }
  let_go_below(UINT64_MAX);
  return true;
}

PageReceiver::~PageReceiver() {
  if (in_) g_lanes.fetch_sub(1, memory_order_relaxed);
}

bool PageReceiver::join(const wire::SocketName& name, int doorbell) noexcept {
  if (in_ || !take_place()) return false;
  auto in = lane_socket();
  const bool hardened = in && os::refuse_descriptors(in->get());
  sockaddr_un address;
  const socklen_t len = wire::to_sockaddr(name, &address);
  if (!in || !os::connect(in->get(), reinterpret_cast<sockaddr*>(&address), len) ||
      !is_welcome(in->get(), doorbell, hardened)) {
    g_lanes.fetch_sub(1, memory_order_relaxed);
    return false;
  }
  in_ = std::move(*in);
  return true;
}

PageReceiver::Part PageReceiver::part_at(uint64_t at, size_t ring_size) noexcept {
  if (begin_ >= end_) {
    // acquire: as in pending().
    const uint64_t count = words_.spans.load(memory_order_acquire);
    if (count == done_) return {.in_ring = SIZE_MAX};
    if (count - done_ > wire::kPageSpans || !in_) return {.lied = true};
    const wire::PageSpan& slot = spans_[done_ % wire::kPageSpans];
    const uint64_t begin = slot.begin.load(memory_order_relaxed);
    const uint64_t end = slot.end.load(memory_order_relaxed);
    if (begin < end_ || begin < at || end <= begin || end - begin > ring_size) {
      return {.lied = true};
    }
    begin_ = begin;
    end_ = end;
  }
  if (at < begin_) return {.in_ring = begin_ - at};
  if (at != begin_) return {.lied = true};
  return {.in_lane = end_ - at};
}

void PageReceiver::moved(size_t n) noexcept {
  begin_ += n;
  if (begin_ == end_) ++done_;
}

long PageReceiver::read(const iovec* iov, size_t n) noexcept {
  const auto got = os::readv(in_.get(), iov, n);
  if (!got) return -value(got.error());
  if (*got == 0) return -EAGAIN;  // nobody has the other end
  moved(*got);
  return static_cast<long>(*got);
}

bool PageReceiver::bring_in(uint64_t at, size_t n, std::byte* ring, size_t ring_size) noexcept {
  return each_piece(ring, ring_size, at, n, [this](std::byte* to, size_t size, size_t) {
    while (size > 0) {
      const iovec iov{to, size};
      const long got = read(&iov, 1);
      if (got == -EINTR) continue;
      if (got <= 0) return false;
      to += got;
      size -= static_cast<size_t>(got);
    }
    return true;
  });
}

}  // namespace rsock::transport
