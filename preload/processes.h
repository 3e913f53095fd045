// What happens around every fork, however the process got to it. See the table in processes.cc.
#pragma once

namespace rsock::preload {

/// pthread_atfork's three: in the forking thread, inside libc's fork.
void before_any_fork() noexcept;
void after_any_fork() noexcept;
void in_forked_child() noexcept;

/// Before a child is made that is, or will be, another program: the streams that it will have go
/// back to TCP. `copied`: which numbers it gets copies of; may be null.
void set_down_for_child(bool (*copied)(int) = nullptr) noexcept;

/// fork, clone and seccomp by number, through syscall(). `w` holds the six arguments.
long process_by_number(long number, const long* w) noexcept;

}  // namespace rsock::preload
