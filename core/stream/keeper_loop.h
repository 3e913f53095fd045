// The inside of the keeper, shared by keeper*.cc, attempt.cc and rendezvous*.cc only. Keeper thread
// only, under KeeperInside::mutex, unless stated.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/base/mutex.h"
#include "core/os/owned_fd.h"
#include "core/stream/stream.h"
#include "core/wire/rendezvous.h"

namespace rsock::stream {

/// What an event of the keeper's epoll is about: a tag in the low bits of a pointer to an 8-aligned
/// object.
enum class KeeperTag : uint64_t {
  kWake = 1,
  kKick = 2,
  kTcp = 3,
  kDoorbell = 4,
  kAttempt = 5,
  kSource = 6
};

/// Whoever else has descriptors in the keeper's epoll. Such an object goes between two rounds of
/// the loop only (in a timer), its descriptors unwatched: no event of this round may name it.
struct alignas(8) KeeperSource {
  virtual void on_event(uint32_t events) noexcept = 0;

 protected:
  ~KeeperSource() = default;
};

struct KeeperState {
  os::OwnedFd epoll;
  os::OwnedFd wake;  // eventfd
  os::OwnedFd kick;  // Unix datagram socket, abstract
  wire::SocketName kick_name;
};

struct Attached {
  Stream* stream;
  uint64_t nonce;
  uint64_t bytes = 0;    // that it had moved when the idle timer last saw a change, ...
  uint64_t last_ns = 0;  // ... and when that was; 0: never looked at
};
/// A stream about which something is to be done at a time, if it is still the same.
struct Due {
  Stream* stream;
  uint32_t generation;
  uint64_t at;
  bool operator<(const Due& o) const noexcept { return at > o.at; }  // a heap with the first on top
};

enum class KeeperLife : int {
  kNone,
  kStarting,
  kRunning,
  kBroken,  // could not be started: everything stays on TCP
};

/// In static memory, never destroyed: the thread may outlive main(). A data call finds it, and asks
/// for a lift, without a lock or an allocation: it may be in a signal handler.
struct KeeperInside {
  /// What the keeper holds except while it sleeps. A fork takes it, so that the child finds nothing
  /// half done and no descriptor in the making. Above every lock of a stream.
  Mutex mutex;
  KeeperState state;  // written before kRunning, read by any thread afterwards
  std::vector<Attached> attached;
  std::vector<Due> strict;
  std::vector<Due> later;     // a heap
  uint64_t tidy_at = 0;       // 0: nothing to tidy
  uint64_t lanes_at = 0;      // when to look at page lanes; 0: not planned
  uint64_t idle_at = 0;       // 0: not planned; UINT64_MAX: nothing is on shared memory
  uint64_t settle_until = 0;  // channels are new: their kicks may have been lost
  int tidy_rounds = 0;
  bool loading = false;  // the keeper opens libraries, without the mutex

  // Any thread:
  std::atomic<bool> tidying{false};  // a channel went, and may have left its segment
  std::atomic<KeeperLife> life{KeeperLife::kNone};
  std::atomic<int> put_off{0};          // times the thread was not started, see keeper.cc
  std::atomic<Stream*> asked{nullptr};  // streams that want a lift, by next_asked
  std::atomic<int> thread{0};           // its id, while it runs
  std::atomic<bool> quit{false};        // it is to end
  std::atomic<bool> first_thread_left{false};
  std::atomic<int> adopted{0};
  /// A descriptor that is kept for its number: for adopt_locked() in a process that has no other
  /// left. -1 while there is none, or its number is in use.
  std::atomic<int> reserve{-1};
  std::atomic<int> reserve_number{-1};
  std::atomic<bool> called{false};  // a line has calls for the keeper's attention
  std::atomic<bool> some_lanes{false};  // page lanes are to be looked at (a hint)
  std::atomic<bool> some_full{false};  // streams with a TCP_USER_TIMEOUT are full (a hint)
  std::atomic<int> owing{0};  // streams that wait for a replay, either way (a hint for the timer)
};

KeeperInside& inside() noexcept;
inline KeeperState& keeper() noexcept { return inside().state; }

// --- keeper.cc ---
uint64_t tagged(const void* object, KeeperTag tag) noexcept;
/// In and out of the keeper's epoll. Any thread.
bool keeper_watch(int fd, uint32_t events, uint64_t data) noexcept;
void keeper_unwatch(int fd) noexcept;
/// Its thread, which must have descriptors, looks at everything once. Any thread, any lock.
void wake_keeper() noexcept;
/// Something waits for the keeper in a line's calls. Any thread, any lock.
void call_keeper() noexcept;
/// Remembers an attached stream for kicks and timers.
void remember_attached(Stream& s, uint64_t nonce) noexcept;
/// The stream is not lifted now. After 10 s, and twice as long each time up to 5 minutes, its
/// traffic may ask again. A peer without the library costs one attempt each time.
void ask_again_later(Stream& s, uint32_t generation, bool shared = false) noexcept;
/// For tests: the first of these times.
void set_first_pause(uint64_t ns) noexcept;

/// exit(0), as libc does when the last thread ends (nptl, start_thread). In a thread of its own:
/// what exit waits for (the answer to an end, replays) is the keeper's to hear, and exit handlers
/// may fork.
void end_process() noexcept;

// --- keeper_thread.cc ---
void* keeper_main(void*) noexcept;

/// Obeys the words of s, and finishes with it if its program has closed it.
void tend(Stream& s) noexcept;
/// An adopted stream whose replay is done, or hopeless: the descriptor closes, FIN goes out. Any
/// thread. With `lingers` the close of the descriptor may wait; the keeper must not.
void finish_if_adopted(Stream& s, bool lingers = false) noexcept;
/// The same after the peer let go of the channel, if it did.
void tend_after_hang_up(Stream& s) noexcept;
/// RSOCK_STRICT: there is no path for s, so there is nothing to wait for.
void fail_strict_now(Stream& s, uint32_t generation) noexcept;

// --- user_timeout.cc ---
uint64_t run_full_timer(uint64_t now) noexcept;
// --- lane_watch.cc ---
uint64_t run_lane_timer(uint64_t now) noexcept;

// --- rendezvous.cc ---
/// Begins (or begins again) to look for the peer of s.
void start_attempt(Stream& s, uint32_t generation) noexcept;
void on_attempt_event(void* attempt, uint32_t events) noexcept;
/// Runs what is due; returns the next time something is (monotonic ns), or UINT64_MAX.
uint64_t run_attempt_timers(uint64_t now) noexcept;
/// In a forked child: the parent's attempts are not ours.
void forget_attempts() noexcept;

// --- rdma_host.cc: peers on other hosts ---
/// Between two rounds, without the mutex: opens rdma-core and looks for devices, if begin says so.
bool begin_look_for_rdma() noexcept;
void look_for_rdma() noexcept;
void end_look_for_rdma() noexcept;
/// Channels that called for attention.
void take_line_calls() noexcept;
uint64_t run_rdma_timers(uint64_t now) noexcept;
void forget_rdma_in_child() noexcept;

}  // namespace rsock::stream
