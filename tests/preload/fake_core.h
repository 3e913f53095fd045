// A core that only remembers what it was asked, for tests of the entries.
//
// Purpose: linked in place of core/stream and core/poll. Descriptors become ours by FdTable::set
// with `fake_stream()`. The memory of what happened is shared with forked children. Thread safety:
// none; tests have one thread.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

#include "core/stream/socket_ops.h"

namespace rsock::fake {

/// What a send or recv of a stream does; empty: the program's own call.
using Transfer = std::function<long(const iovec* iov, size_t n, int flags)>;

struct Behaviour {
  Transfer send;
  Transfer recv;
  std::function<long()> wait;  // poll, select and epoll_wait; empty: the program's own call
  bool may_matter = false;
  bool pins = true;  // pin_to_tcp() says 0
};

Behaviour& behaviour();
stream::Stream* fake_stream();

/// A line as calls() gives it.
std::string line(const char* format, ...) __attribute__((format(printf, 1, 2)));

/// Forgets everything, also in the table.
void reset();
/// "before_close 7" and so on, in order.
std::vector<std::string> calls();
void note(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace rsock::fake
