// What the parts of the stress share: options, random numbers, output, the watch over every thread,
// and the plan of a stream's life.
//
// A *life* is one TCP connection from connect() to close(). What it carries follows from (seed,
// slot, life) and is known to both ends; how each end waits and calls is its own business and
// follows from the same numbers and its role. A stall is a thread that waits for longer than
// `stall` seconds without a byte: peers never pause for more than a few milliseconds, so somebody
// has missed a wake-up.
#pragma once

#include <errno.h>
#include <stdint.h>

#include <atomic>
#include <string>
#include <vector>

extern "C" {
#include "known_bytes.h"
}

namespace stress {

// ---- options ----

/// How often what happens; all zero is a calm life. Rates are per second and process, shares in
/// percent of the lives.
struct Mix {
  const char* name;
  int moves, forks, spawns, signals, ctls, pokes;  // rates
  int pooled, served_by_fork, rude, urgent,
      quiet;  // shares; quiet: nothing but the peer ends a wait of that life
};

struct Options {
  uint64_t seed = 1;
  int slots = 12;
  double seconds = 10;
  double stall = 10;
  Mix mix;
};
extern Options options;
void parse_options(int argc, char** argv, int first);

// ---- random numbers, time, output ----

class Random {
 public:
  explicit Random(uint64_t a, uint64_t b = 0, uint64_t c = 0)
      : state_(a * 1000003 + b * 7919 + c * 104729) {
    next();
  }
  uint64_t next() { return split_mix(&state_); }
  size_t below(size_t limit) { return stress_below(limit); }
  size_t size(size_t largest) { return random_size(&state_, largest); }
  bool percent(int share) { return static_cast<int>(below(100)) < share; }

 private:
  size_t stress_below(size_t limit) { return ::below(&state_, limit); }
  uint64_t state_;
};

int64_t now_ns();
void sleep_us(int64_t us);  // goes on after a signal
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
const char* errno_name(int error);
long checked(long result, const char* what, int line);
#define CHECKED(call) ::stress::checked((call), #call, __LINE__)

// ---- the watch ----

/// What a thread is doing, for the watch; lives in memory that forked children share, and is never
/// freed.
struct Doing {
  std::atomic<bool> used{false};
  std::atomic<const char*> name{nullptr};  // literals
  std::atomic<const char*> call{nullptr};  // nullptr: not waiting
  std::atomic<int64_t> since{0};           // last progress
  std::atomic<int64_t> begun{0};           // the call; where it is noted
  std::atomic<int> slot{-1}, life{-1}, fd{-1};
};
Doing* new_doing(const char* name);
void give_back(Doing* doing);

/// Says what the thread waits in, as long as it lives; nullptr: what it said before.
class InCall {
 public:
  InCall(Doing* doing, const char* call, bool anew = false)
      : doing_(doing), before_(doing->call.load(std::memory_order_relaxed)) {
    if (anew) doing_->since.store(now_ns(), std::memory_order_relaxed);
    if (call != nullptr) doing_->call.store(call, std::memory_order_relaxed);
  }
  ~InCall() { doing_->call.store(before_, std::memory_order_relaxed); }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  Doing* const doing_;
  const char* const before_;
};

/// Starts the thread that looks for stalls, and dumps when the other role stalls (it says so on
/// `control`). Peers may take `control`'s other messages from `wait_for_bye()`.
void start_watch(int control);
void say_bye();
void wait_for_bye();
extern void (*dump_streams)();
extern const char* (*look_further)(int64_t limit_ns);  // what else stalls

/// Counts for the last line.
struct Counts {
  std::atomic<uint64_t> lives{0}, bytes{0}, waits{0}, moves{0}, forks{0}, spawns{0}, signals{0},
      false_in{0}, false_out{0};
};
extern Counts counts;

// ---- the plan of a life ----

enum class Shape { kBoth, kOneWay, kExchange };

struct Plan {
  int slot = 0, life = 0;
  Shape shape = Shape::kBoth;
  std::vector<uint64_t> from_client, from_server;  // kExchange: up to where each turn goes
  uint64_t client_total = 0, server_total = 0;
  int lazy = 0;  // 1, 2: the client, the server closes without shutdown
  int rude =
      0;  // 1, 2: the client, the server goes away at `rude_at` bytes, both directions together
  uint64_t rude_at = 0;
  int urgent_turn = -1;  // kExchange: from this turn on bytes are out of band now and then
  uint64_t shift(bool client_sends) const {
    return static_cast<uint64_t>(slot) * 7919 + static_cast<uint64_t>(life) * 104729 +
           (client_sends ? 0 : 524287);
  }
};
Plan make_plan(int slot, int life);

}  // namespace stress
