#include "core/stream/shared_key.h"

#include <fcntl.h>
#include <sys/stat.h>

#include "core/base/config.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/os/owned_fd.h"

namespace rsock::stream {
namespace {

constexpr size_t kLongest = 4096;  // what follows in the file is not looked at
constexpr size_t kShortest = 16;   // after the newlines at its end went

uint8_t g_key[kLongest];
size_t g_size = 0;
bool g_read = false;

size_t read_key(const char* path) noexcept {
  const auto fd = os::make_internal([=] { return os::open(path, O_RDONLY | O_CLOEXEC, 0); });
  if (!fd) return 0;
  size_t size = 0;
  while (size < kLongest) {
    const auto got = os::read(fd->get(), g_key + size, kLongest - size);
    if (!got || *got == 0) break;
    size += *got;
  }
  // What an editor, or echo, puts behind it.
  while (size > 0 && (g_key[size - 1] == '\n' || g_key[size - 1] == '\r')) --size;
  return size;
}

}  // namespace

std::optional<std::span<const uint8_t>> shared_key() noexcept {
  const char* path = config().key_file;
  if (path == nullptr) return std::span<const uint8_t>{};
  if (!g_read) {
    g_read = true;
    g_size = read_key(path);
    if (g_size < kShortest) {
      RSOCK_LOG(kError, "%s: no key of at least %zu bytes: nothing is lifted to other hosts", path,
                kShortest);
    }
  }
  if (g_size < kShortest) return std::nullopt;
  return std::span<const uint8_t>(g_key, g_size);
}

}  // namespace rsock::stream
