// fork and exec as preload/ does them around the library.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "tests/stream/loopback.h"

namespace rsock::testing {

inline pid_t fork_with_hooks() {
  stream::prepare_fork();
  stream::before_fork();
  const pid_t child = ::fork();
  if (child == 0) {
    stream::after_fork_child();
  } else {
    stream::after_fork_parent(child < 0);
  }
  return child;
}

/// Exit status, or -1.
inline int wait_for(pid_t child) {
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace rsock::testing
