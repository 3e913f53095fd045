#include "core/stream/notes.h"

#include <fcntl.h>

#include "core/os/os.h"

namespace rsock::stream {
namespace {

// Offsets: 3 bits for the region, then 60. With a key: 22 bits of it (PID_MAX_LIMIT), 4 for the
// field, and 34 for its value, which is the length of the lock less one. A holder: twice its id.
// No two notes touch: the kernel would make one lock of them.
constexpr int kRegionBits = 60;
constexpr int kValueBits = 34;
constexpr uint32_t kMostKey = (1u << 22) - 1;
constexpr uint64_t kHolders = uint64_t{6} << kRegionBits;
constexpr uint64_t kEverything = uint64_t{4} << kRegionBits;

enum Field : uint64_t { kHere, kTxLow, kTxHigh, kRxLow, kRxHigh, kComing };

struct Range {
  uint64_t first;
  uint64_t length;  // 0: to the end
};

constexpr uint64_t region(Way way) noexcept {
  return (way == Way::kExec ? uint64_t{4} : uint64_t{5}) << kRegionBits;
}

constexpr Range slot(Way way, uint32_t key, Field field) noexcept {
  const uint64_t number = uint64_t{key & kMostKey} << 4 | field;
  return {region(way) | number << kValueBits, uint64_t{1} << kValueBits};
}

constexpr Range holder(uint32_t id) noexcept { return {kHolders + uint64_t{id} * 2, 1}; }

struct flock lock_of(short type, Range range) noexcept {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(range.first);
  lock.l_len = static_cast<off_t>(range.length);
  return lock;
}

bool set(int fd, short type, Range range) noexcept {
  struct flock lock = lock_of(type, range);
  return os::fcntl(fd, F_OFD_SETLK, reinterpret_cast<long>(&lock)).has_value();
}

/// The first note in there; length 0: none. Asked for as a process, which is another owner than the
/// description: its locks are in the way.
std::optional<Range> first_in(int fd, Range range) noexcept {
  struct flock lock = lock_of(F_WRLCK, range);
  if (!os::fcntl(fd, F_GETLK, reinterpret_cast<long>(&lock))) return std::nullopt;
  if (lock.l_type == F_UNLCK) return Range{0, 0};
  return Range{static_cast<uint64_t>(lock.l_start), static_cast<uint64_t>(lock.l_len)};
}

bool write_value(int fd, Way way, uint32_t key, Field field, uint64_t value) noexcept {
  return set(fd, F_WRLCK, {slot(way, key, field).first, value + 1});
}

/// What is not there is 0.
std::optional<uint64_t> read_value(int fd, Way way, uint32_t key, Field field) noexcept {
  const Range in = slot(way, key, field);
  const auto found = first_in(fd, in);
  if (!found) return std::nullopt;
  if (found->length == 0) return 0;
  if (found->first != in.first) return std::nullopt;
  return found->length - 1;
}

bool write_wide(int fd, Way way, uint32_t key, Field low, uint64_t value) noexcept {
  const auto high = static_cast<Field>(low + 1);
  return (value == 0 || write_value(fd, way, key, low, value & 0xffffffff)) &&
         (value >> 32 == 0 || write_value(fd, way, key, high, value >> 32));
}

std::optional<uint64_t> read_wide(int fd, Way way, uint32_t key, Field low) noexcept {
  const auto bottom = read_value(fd, way, key, low);
  const auto top = read_value(fd, way, key, static_cast<Field>(low + 1));
  if (!bottom || !top) return std::nullopt;
  return *top << 32 | *bottom;
}

uint32_t random_word() noexcept {
  uint32_t word = 0;
  (void)os::getrandom(&word, sizeof(word));
  return word;
}

}  // namespace

bool write_carried(int fd, Way way, uint32_t key, const Carried& carried) noexcept {
  if (key > kMostKey) return false;
  // The one that says that it is there comes last.
  if (write_wide(fd, way, key, kTxLow, carried.tx_off_tcp) &&
      write_wide(fd, way, key, kRxLow, carried.rx_off_tcp) &&
      write_value(fd, way, key, kHere, carried.connected_here ? 1 : 0)) {
    return true;
  }
  erase_carried(fd, way, key);
  return false;
}

bool announce_carried(int fd, Way way, uint32_t key) noexcept {
  return key <= kMostKey && write_value(fd, way, key, kComing, 0);
}

std::optional<Carried> read_carried(int fd, Way way, uint32_t key) noexcept {
  const Range in = slot(way, key, kHere);
  const auto here = first_in(fd, in);
  if (!here || here->length == 0 || here->first != in.first) return std::nullopt;
  const auto tx = read_wide(fd, way, key, kTxLow);
  const auto rx = read_wide(fd, way, key, kRxLow);
  if (!tx || !rx) return std::nullopt;
  return Carried{here->length == 2, *tx, *rx};
}

void erase_carried(int fd, Way way, uint32_t key) noexcept {
  const Range first = slot(way, key, kHere);
  (void)set(fd, F_UNLCK, {first.first, first.length << 4});
}

std::optional<uint32_t> find_passing(int fd) noexcept {
  uint64_t from = region(Way::kPassing);
  constexpr int kMost = 64;
  for (int i = 0; i < kMost; ++i) {
    const auto found = first_in(fd, {from, kHolders - from});
    if (!found || found->length == 0) return std::nullopt;
    const uint64_t number = (found->first & ((uint64_t{1} << kRegionBits) - 1)) >> kValueBits;
    if ((number & 15) == kHere) return static_cast<uint32_t>(number >> 4);
    from = (region(Way::kPassing) | (number | 15) << kValueBits) + (uint64_t{1} << kValueBits);
    if (from >= kHolders) break;  // being written, all of them
  }
  return std::nullopt;
}

uint32_t exec_key() noexcept { return static_cast<uint32_t>(os::getpid()); }

uint32_t fresh_key() noexcept { return random_word() & kMostKey; }

bool write_holder(int fd, uint32_t id) noexcept { return set(fd, F_WRLCK, holder(id)); }

void erase_holder(int fd, uint32_t id) noexcept { (void)set(fd, F_UNLCK, holder(id)); }

uint32_t fresh_id() noexcept {
  const uint32_t id = random_word();
  return id != 0 ? id : 1;
}

bool others_hold(int fd, uint32_t own) noexcept {
  const auto under_way = first_in(fd, {kEverything, kHolders - kEverything});
  if (!under_way || under_way->length != 0) return true;
  const Range mine = holder(own);
  const auto before = first_in(fd, {kHolders, mine.first - kHolders + (own == 0 ? 1 : 0)});
  if (!before || before->length != 0) return true;
  const auto behind = first_in(fd, {mine.first + 1, 0});
  return !behind || behind->length != 0;
}

}  // namespace rsock::stream
