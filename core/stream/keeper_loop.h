// The inside of the keeper, shared by keeper.cc, attempt.cc and rendezvous*.cc only. Keeper thread
// only unless stated.
#pragma once

#include <cstdint>

#include "core/os/owned_fd.h"
#include "core/stream/stream.h"
#include "core/wire/rendezvous.h"

namespace rsock::stream {

/// What an event of the keeper's epoll is about: a tag in the low bits of a pointer to an 8-aligned
/// object.
enum class KeeperTag : uint64_t { kWake = 1, kKick = 2, kTcp = 3, kDoorbell = 4, kAttempt = 5 };

struct KeeperState {
  os::OwnedFd epoll;
  os::OwnedFd wake;  // eventfd
  os::OwnedFd kick;  // Unix datagram socket, abstract
  wire::SocketName kick_name;
};

KeeperState& keeper() noexcept;

/// Remembers an attached stream for kicks and timers.
void remember_attached(Stream& s, uint64_t nonce) noexcept;

// --- rendezvous.cc ---
/// Begins (or begins again) to look for the peer of s.
void start_attempt(Stream& s, uint32_t generation) noexcept;
void on_attempt_event(void* attempt, uint32_t events) noexcept;
/// Runs what is due; returns the next time something is (monotonic ns), or UINT64_MAX.
uint64_t run_attempt_timers(uint64_t now) noexcept;
/// In a forked child: the parent's attempts are not ours.
void forget_attempts() noexcept;

}  // namespace rsock::stream
