// clang-format off
// Descriptors in messages of Unix sockets (SCM_RIGHTS).
//
// | sender, before the message                     | sender, afterwards                          | receiver, behind its message                                |
// |------------------------------------------------|---------------------------------------------|-------------------------------------------------------------|
// | note of its own, note of the passing; set down | on failure that of the passing is taken back | a stream with its own note; that of the passing taken back |
//
// The sender has its stream as before, and may lift it when it is alone again; so may the receiver.
// Who has no library takes no note back: then nobody lifts it any more.
// clang-format on

#include "core/base/deadline.h"
#include "core/os/os.h"
#include "core/stream/hand_over.h"
#include "core/stream/holders.h"
#include "core/stream/lineage.h"
#include "core/stream/moves.h"
#include "core/stream/notes.h"
#include "core/stream/socket_ops.h"

namespace rsock::stream {
namespace {

constexpr Reason kPassed = "passed to another process";

/// fn(fd) for each descriptor in there. (The caller has seen that it can be read.)
template <typename F>
void for_each_passed(const msghdr* msg, F fn) noexcept {
  if (msg == nullptr || msg->msg_control == nullptr) return;
  auto* header = const_cast<msghdr*>(msg);
  for (cmsghdr* c = CMSG_FIRSTHDR(header); c != nullptr; c = CMSG_NXTHDR(header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || c->cmsg_len < CMSG_LEN(0))
      continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const auto* fds = reinterpret_cast<const int*>(CMSG_DATA(c));
    for (size_t i = 0; i < count; ++i) fn(fds[i]);
  }
}

/// From here on the stream is not lifted: attach() finds the notes. What it moved off TCP is
/// written when that is final.
bool announce(Stream& s, int fd, uint32_t key) noexcept {
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  if (s.given_away || s.strange.load(std::memory_order_relaxed)) return false;
  return write_note_locked(s, fd) && announce_carried(fd, Way::kPassing, key);
}

/// True: everything is on TCP, and the next one is told how it came there.
bool complete(Stream& s, int fd, uint32_t key) noexcept {
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  if (s.channel || s.tx.state != TxState::kKernel) return false;
  return write_carried(fd, Way::kPassing, key,
                       Carried{s.connected_here, s.tx.off_tcp, s.rx.off_tcp});
}

/// Whoever gets it, nobody lifts it any more.
void pass_for_good(Stream& s, int fd, uint32_t key) noexcept {
  give_away(s);
  (void)pin_to_tcp(fd, kPassed);
  MutexLock tx(s.tx.mutex);
  MutexLock rx(s.rx.mutex);
  (void)write_holder(fd, fresh_id());
  erase_carried(fd, Way::kPassing, key);
}

}  // namespace

uint32_t before_passing(const msghdr* msg) noexcept {
  uint32_t key = 0;
  for_each_passed(msg, [&key](int fd) {
    if (FdTable::kind(fd) == FdKind::kEpoll) give_instance_away();
    Stream* const s = FdTable::stream(fd);
    if (s == nullptr) return;
    if (key == 0) key = fresh_key() | 1;
    const uint32_t generation = s->generation.load(std::memory_order_acquire);
    const HandlerWatch since;
    if (!announce(*s, fd, key)) return pass_for_good(*s, fd, key);
    (void)leave_to_kernel(*s, generation, kPassed, true, since);
    if (!complete(*s, fd, key)) pass_for_good(*s, fd, key);
  });
  return key;
}

void after_passing(const msghdr* msg, uint32_t key, bool sent) noexcept {
  if (key == 0 || sent) return;
  for_each_passed(msg, [key](int fd) {
    if (FdTable::stream(fd) != nullptr) erase_carried(fd, Way::kPassing, key);
  });
}

void on_descriptors_received(const msghdr* msg, bool peeked) noexcept {
  for_each_passed(msg, [peeked](int fd) { on_received(fd, peeked); });
}

}  // namespace rsock::stream
