// One stream that looks for its peer: shared by attempt.cc and rendezvous*.cc only. Keeper thread
// only.
//
// The end with the smaller address calls; the other listens on an abstract socket named after the
// connection. The life of an attempt is in rendezvous.cc, what each does of it in
// rendezvous_caller.cc and rendezvous_callee.cc, what both need in attempt.cc. Ownership: the list
// in rendezvous.cc.
#pragma once

#include <cstdint>
#include <memory>

#include "core/os/owned_fd.h"
#include "core/stream/sock_diag.h"
#include "core/stream/stream.h"
#include "core/transport/shm/segment_pool.h"
#include "core/transport/shm/shm_segment.h"
#include "core/wire/rendezvous.h"

namespace rsock::stream {

inline constexpr uint64_t kMs = 1'000'000;
inline constexpr uint64_t kListenNs = 8'000 * kMs;  // as long as a caller goes on trying
inline constexpr uint64_t kAnswerNs = 1'000 * kMs;  // one message of a peer's keeper

enum class Phase : uint8_t { kRetry, kListen, kAwaitHello, kAwaitWelcome, kAwaitConfirm };

/// What every way of looking for a peer needs to know of the stream.
struct Seeker {
  Stream* stream = nullptr;
  uint32_t generation = 0;
  bool over = false;
  bool may_pass = false;   // what examine() found may be otherwise later
  bool shared = false;     // another process has the stream as well
  bool by_rdma = false;    // the peer is on another host, or shared memory is not to be used
  bool peer_here = false;  // sock_diag knows the other end: `peer` is filled
  uint32_t tries = 0;
  uint64_t due = 0;    // when to try again; else when the wait for this message is over
  uint64_t until = 0;  // callee: when to stop listening
  wire::FourTuple tuple;
  wire::SocketName name;
  PeerFacts peer{};
  uint64_t own_cookie = 0;
};

struct alignas(8) Attempt : Seeker {
  Phase phase = Phase::kRetry;
  os::OwnedFd listener;
  os::OwnedFd connection;
  os::OwnedFd memfd;           // caller: of `segment`, for its next use; callee: came with HELLO
  transport::Partner partner;  // who answers, or calls
  uint64_t nonce = 0;
  wire::SocketName peer_kick;
  std::unique_ptr<transport::ShmSegment> segment;
  uint8_t inbox[256];
  size_t inbox_size = 0;
};

// --- attempt.cc ---
/// Looks at the stream and its connection; fills the seeker. A reason if it must stay on TCP.
Reason examine(Seeker& a) noexcept;
/// uid is root's or that of the owner of the other end, and says something (D11).
bool is_peer(uint32_t uid, const PeerFacts& facts) noexcept;
/// The Unix peer must be root or who owns the other end of the TCP connection (D11). Notes who it
/// is.
bool peer_may_speak(Attempt& a) noexcept;
/// A stream socket for keepers of this host. Errors: as os::make_internal().
Result<os::OwnedFd> unix_socket() noexcept;
/// Such a socket listens under an abstract name. EADDRINUSE: somebody has it.
Result<void> listen_on(const os::OwnedFd& fd, const wire::SocketName& name, int backlog) noexcept;
/// Events of fd come to this attempt, until keeper_unwatch().
void watch(Attempt& a, int fd) noexcept;
void drop_connection(Attempt& a) noexcept;
bool send_message(Attempt& a, const uint8_t* bytes, size_t n, int passed_fd) noexcept;
/// Reads towards `want` bytes, never past them (a ring may follow CONFIRM). Takes a passed
/// descriptor. 1: complete, 0: more to come, -1: the peer is gone or misbehaves.
int read_message(Attempt& a, size_t want, os::OwnedFd* passed) noexcept;

// --- rendezvous.cc ---
bool still_wanted(const Seeker& a) noexcept;
/// The attempt ends without a channel; the stream stays on TCP for `reason`.
void give_up(Seeker& a, Reason reason) noexcept;
/// The same for a reason that may pass: further traffic asks again, later and later.
void not_now(Seeker& a, Reason reason) noexcept;
/// The caller begins anew after a while, or gives up for `reason` when it did so often enough.
void retry_later(Attempt& a, Reason reason) noexcept;
/// Both keepers agree: the channel goes under the stream.
bool lift(Attempt& a, bool caller) noexcept;

// --- rendezvous_caller.cc ---
void call_peer(Attempt& a) noexcept;
void on_welcome(Attempt& a) noexcept;

// --- rendezvous_callee.cc ---
void listen_for_peer(Attempt& a) noexcept;
void back_to_listening(Attempt& a) noexcept;
void on_caller(Attempt& a) noexcept;
void on_hello(Attempt& a) noexcept;
void on_confirm(Attempt& a) noexcept;

}  // namespace rsock::stream
