// How many bits of its sets a program's select looks at.
//
// core_sys_select() cuts nfds to the size of the descriptor table, which grows by powers of two to
// hold the highest number that was ever open (fs/file.c). Old programs rely on it: select(
// getdtablesize(), ...) with sets of 1,024 bits. Our descriptors lie in the top quarter of the
// limit, so with a high limit the kernel would go on far behind the sets.

#include <fcntl.h>
#include <sys/syscall.h>

#include <algorithm>
#include <bit>

#include "core/os/os.h"
#include "core/poll/readiness_ops.h"

namespace rsock::poll {
namespace {

using stream::FdKind;
using stream::FdTable;

/// What a set has at least. A smaller table of the program's is not told apart.
constexpr int kUsual = 1024;

struct Entry {  // getdents64(2)
  uint64_t inode;
  int64_t offset;
  unsigned short size;
  unsigned char type;
  char name[];
};

/// The highest number in /proc/self/fd that is the program's, or -1 when it can't be read.
int highest_of_program() noexcept {
  const auto dir = os::open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (!dir) return -1;
  int highest = 0;
  alignas(Entry) char bytes[4096];
  long n = 0;
  // No wrapper in os.h: nobody else reads directories.
  while ((n = os::door()(SYS_getdents64, *dir, reinterpret_cast<long>(bytes), sizeof(bytes), 0, 0,
                         0)) > 0) {
    for (long at = 0; at < n;) {
      const auto& entry = *reinterpret_cast<const Entry*>(bytes + at);
      int fd = 0;
      for (const char* c = entry.name; *c >= '0' && *c <= '9'; ++c) fd = fd * 10 + (*c - '0');
      if (fd != *dir && FdTable::kind(fd) != FdKind::kInternal) highest = std::max(highest, fd);
      at += entry.size;
    }
  }
  (void)os::close(*dir);
  return n < 0 ? -1 : highest;
}

}  // namespace

int select_width(int nfds) noexcept {
  if (nfds <= kUsual) return nfds;
  // The usual large call ends at the program's highest descriptor.
  const int last = nfds - 1;
  if (FdTable::kind(last) != FdKind::kInternal && os::fcntl(last, F_GETFD)) return nfds;
  const int highest = highest_of_program();
  if (highest < 0) return nfds;
  const auto table = static_cast<int>(std::bit_ceil(static_cast<unsigned>(highest) + 1));
  return std::min(nfds, std::max(kUsual, table));
}

}  // namespace rsock::poll
