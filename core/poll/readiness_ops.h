// poll, select and epoll for sets in which streams and kernel descriptors are mixed.
//
// Purpose: the door between preload/ and core/poll. Results are values >= 0 or -errno; `kernel`
// performs the program's own call unchanged and is used when no descriptor of the set needs us.
// Thread safety: all from any thread.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <time.h>

#include "core/stream/socket_ops.h"

namespace rsock::poll {

using stream::KernelCall;

/// poll and ppoll. timeout null: for ever; not modified. sigmask null: unchanged.
long poll(pollfd* fds, nfds_t n, const timespec* timeout, const sigset_t* sigmask,
          KernelCall kernel);

/// select and pselect. On return *remaining (if not null) holds the time left, as Linux's select
/// does; sets and count as select(2).
long select(int nfds, fd_set* read, fd_set* write, fd_set* except, const timespec* timeout,
            timespec* remaining, const sigset_t* sigmask, KernelCall kernel);

/// The nfds that select would look at if our own descriptors, at high numbers, had not enlarged the
/// process's table: the kernel reads and writes as many bits of the program's sets.
int select_width(int nfds) noexcept;

/// epoll_create or epoll_create1 gave epfd.
void on_epoll_create(int epfd) noexcept;
/// epoll_ctl: does the kernel's part too.
long epoll_ctl(int epfd, int op, int fd, epoll_event* event, KernelCall kernel);
/// epoll_wait, epoll_pwait, epoll_pwait2. timeout null: for ever.
long epoll_wait(int epfd, epoll_event* events, int max_events, const timespec* timeout,
                const sigset_t* sigmask, KernelCall kernel);
/// epfd is about to be closed: called by before_close() through the hook below, and by nobody else.
void on_epoll_close(void* instance) noexcept;

/// fd is about to be watched by poll, select or an epoll instance: if it is an epoll instance
/// itself, whoever watches it sees only the kernel's side, so its streams stay on TCP from here on.
void note_watched(int fd) noexcept;

/// False when no stream is registered in the process: the caller may go to the kernel at once.
bool may_matter() noexcept;

}  // namespace rsock::poll
