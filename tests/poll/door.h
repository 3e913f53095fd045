// A door to the kernel that a test can change while threads run: refuses or delays single calls.
#pragma once

#include <atomic>

#include "core/base/raw_syscall.h"
#include "core/os/os.h"

namespace rsock::testing {

inline std::atomic<os::Door> current_door{&raw_syscall};

inline long through_current_door(long nr, long a, long b, long c, long d, long e, long f) noexcept {
  return current_door.load(std::memory_order_acquire)(nr, a, b, c, d, e, f);
}
/// Before main: os::set_door() is for the time before threads.
inline const bool door_is_ours = (os::set_door(&through_current_door), true);

class OtherDoor {
 public:
  explicit OtherDoor(os::Door door) { current_door.store(door, std::memory_order_release); }
  ~OtherDoor() { current_door.store(&raw_syscall, std::memory_order_release); }
  OtherDoor(const OtherDoor&) = delete;
  OtherDoor& operator=(const OtherDoor&) = delete;
};

}  // namespace rsock::testing
