// What the operator asked for: RSOCK_* variables and the configuration file.
//
// Purpose: parsed once, before the first stream; immutable afterwards. Names are fixed by README.
// Bad input: an unknown key, variable or value is reported once by name with the nearest known one,
// and the default is used (messages() holds the lines; the log prints them when it opens). Thread
// safety: config() may be called from any thread after load_config().
#pragma once

#include <cstddef>
#include <cstdint>

namespace rsock {

enum class LogLevel : uint8_t { kError, kWarn, kInfo, kDebug };

struct Config {
  bool allow_shm = true;
  bool allow_rdma = true;
  bool allow_tcp = true;  // "tcp" is among RSOCK_PATH, or RSOCK_PATH is "auto" without RSOCK_STRICT
  bool enabled = true;    // false: RSOCK_PATH=tcp, no stream is ever tracked
  bool strict = false;    // RSOCK_STRICT
  LogLevel log_level = LogLevel::kWarn;
  const char* log_file = nullptr;      // RSOCK_LOG_FILE
  bool log_stderr = false;             // RSOCK_LOG was given
  const char* summary_file = nullptr;  // RSOCK_SUMMARY
  uint32_t lift_bytes = 64 * 1024;     // RSOCK_LIFT_BYTES: lift after so many bytes ...
  uint32_t lift_calls = 16;            // RSOCK_LIFT_CALLS: ... or so many intercepted calls
  uint32_t spin_us = 50;               // RSOCK_SPIN_US: longest spin before sleeping; 0 never spins
  uint32_t ring_bytes =
      0;  // RSOCK_RING_BYTES: each direction; a power of two, 64 KiB to 64 MiB. 0: not given
  const char* key_file = nullptr;  // RSOCK_KEY_FILE: the file holds the shared key
  uint32_t rdma_streams = 0;       // RSOCK_RDMA_STREAMS: most on queue pairs; 0: as the device can
  uint32_t shm_idle_s = 60;        // RSOCK_SHM_IDLE_S: give the rings back after; 0: never
  uint32_t rdma_idle_s = 60;       // RSOCK_RDMA_IDLE_S: give the queue pair back after; 0: never
  bool rdma_immediate = true;      // RSOCK_RDMA_IMMEDIATE; false: WRITE, then SEND, as on iWARP
};

/// Reads `environ`-style strings and RSOCK_CONFIG (default /etc/rsock.conf). Calls no libc function
/// that the library intercepts. May be called again in tests.
void load_config(const char* const* environment) noexcept;
const Config& config() noexcept;

/// Complaints found while loading, one line each, without a newline. Valid for ever.
size_t config_complaints() noexcept;
const char* config_complaint(size_t index) noexcept;

}  // namespace rsock
