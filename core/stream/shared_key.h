// The key that hosts share (RSOCK_KEY_FILE), if the operator gave one.
//
// Thread safety: keeper only. Read once, when the first line needs it; kept for the life of the
// process.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace rsock::stream {

/// Empty: none was asked for. Nothing: the file can't be read or holds less than 16 bytes, and
/// nobody may be trusted.
std::optional<std::span<const uint8_t>> shared_key() noexcept;

}  // namespace rsock::stream
