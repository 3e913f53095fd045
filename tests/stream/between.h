// Something that happens between two system calls of the library: races without luck.
//
// os::set_door stands between core and the kernel. `Between` acts once, just before or just after
// the first call that it waits for; `Dropped` swallows calls. One translation unit, one of each at
// a time.
#pragma once

#include "core/base/raw_syscall.h"
#include "core/os/os.h"
#include "tests/stream/loopback.h"

namespace rsock::testing {

struct Call {
  long number;
  long a, b, c;
};

class Between {
 public:
  using Matches = bool (*)(const Call&);
  using Act = void (*)(void*);
  enum When { kBefore, kAfter };

  Between(When when, Matches matches, Act act, void* arg) {
    when_ = when;
    act_ = act;
    arg_ = arg;
    matches_.store(matches, std::memory_order_release);
  }
  ~Between() { matches_.store(nullptr, std::memory_order_release); }
  static bool done() { return matches_.load() == nullptr; }

  static long door(long n, long a, long b, long c, long d, long e, long f) noexcept {
    if (const auto drop = dropped_.load(std::memory_order_acquire);
        drop != nullptr && drop(Call{n, a, b, c})) {
      return -EAGAIN;
    }
    Matches matches = matches_.load(std::memory_order_acquire);
    const bool mine = matches != nullptr && matches(Call{n, a, b, c}) &&
                      matches_.compare_exchange_strong(matches, nullptr);
    if (mine && when_ == kBefore) act_(arg_);
    const long r = raw_syscall(n, a, b, c, d, e, f);
    if (mine && when_ == kAfter) act_(arg_);
    return r;
  }

 private:
  friend class Dropped;
  static inline std::atomic<Matches> matches_{nullptr};
  static inline std::atomic<Matches> dropped_{nullptr};
  static inline When when_ = kBefore;
  static inline Act act_ = nullptr;
  static inline void* arg_ = nullptr;
  static inline const bool installed_ = (os::set_door(&Between::door), true);
};

/// While it lives, such calls say EAGAIN and do nothing.
class Dropped {
 public:
  explicit Dropped(Between::Matches matches) {
    Between::dropped_.store(matches, std::memory_order_release);
  }
  ~Dropped() { Between::dropped_.store(nullptr, std::memory_order_release); }
};

}  // namespace rsock::testing
