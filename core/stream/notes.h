// What the holders of a connection write on it for one another.
//
// Purpose: a connection goes from program to program by exec and by SCM_RIGHTS, and who gets it has
// to know whether anybody else still has it. Memory does not go along. The file does: a lock of the
// open file description (fcntl(2), F_OFD_SETLK) belongs to the connection itself, is seen by every
// process that has it, and goes with its last descriptor. A lock says where it begins and how long
// it is, which is room enough: a *note* is one lock, far beyond any offset that a program would
// lock on a socket. Nothing is left in the new program that it could trip over.
//
//   holder  one process, or one family of forked ones, has the connection
//   exec    a process is about to become another program, which takes the connection over
//   passing the connection is on its way through a Unix socket
//
// Invariant: who knows of a note besides its own never takes the connection for its own alone. So a
// note that nobody takes back (its process was killed) costs a lift, and no byte.
// Thread safety: each call is the kernel's; processes that share a connection share its notes. No
// locks needed. Errors: a kernel without such locks has no notes, and write_*() says so.
#pragma once

#include <cstdint>
#include <optional>

namespace rsock::stream {

/// What the next program can't ask the kernel.
struct Carried {
  bool connected_here = false;  // by connect(): tcpi_bytes_acked counts our SYN
  uint64_t tx_off_tcp = 0;      // Stream::tx.off_tcp, which never changes while two hold it
  uint64_t rx_off_tcp = 0;
};

enum class Way : uint8_t { kExec, kPassing };

/// `key`: of an exec the process (exec_key()), which stays the same; of a passing a random one
/// (fresh_key()).
bool write_carried(int fd, Way way, uint32_t key, const Carried& carried) noexcept;
/// A note that is not there to be read yet, but in the way of a lift. erase_carried() takes it
/// back.
bool announce_carried(int fd, Way way, uint32_t key) noexcept;
std::optional<Carried> read_carried(int fd, Way way, uint32_t key) noexcept;
void erase_carried(int fd, Way way, uint32_t key) noexcept;
/// Any passing: which of several is all the same, each stands for one more holder.
std::optional<uint32_t> find_passing(int fd) noexcept;
uint32_t fresh_key() noexcept;
uint32_t exec_key() noexcept;

/// `id`: random, not 0 (fresh_id()).
bool write_holder(int fd, uint32_t id) noexcept;
void erase_holder(int fd, uint32_t id) noexcept;
uint32_t fresh_id() noexcept;

/// There is a note, of whichever kind, beside the holder `own`. Also where the kernel doesn't say.
bool others_hold(int fd, uint32_t own) noexcept;

}  // namespace rsock::stream
