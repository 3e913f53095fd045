// The headers that declare what intercept.def lists, and the few names that no header declares.
//
// Purpose: pointer types are `decltype(&::name)`, and the compiler compares each entry with libc's
// own prototype. Compile with FORTIFY off (CMakeLists.txt): it replaces the names by inline
// functions.
#pragma once

#include <aio.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utmp.h>

#include <linux/close_range.h>

// System calls that newer architectures do without: numbers that no program passes.
#ifndef SYS_dup2
#define SYS_dup2 (-102)
#endif
#ifndef SYS_poll
#define SYS_poll (-103)
#endif
#ifndef SYS_select
#define SYS_select (-104)
#endif
#ifndef SYS_epoll_create
#define SYS_epoll_create (-105)
#endif
#ifndef SYS_epoll_wait
#define SYS_epoll_wait (-106)
#endif

extern "C" {
// glibc 2.36 declares it for C only.
#include <sys/pidfd.h>

// FORTIFY's entry points: what programs built with -D_FORTIFY_SOURCE call.
ssize_t __read_chk(int fd, void* buf, size_t n, size_t size);
ssize_t __recv_chk(int fd, void* buf, size_t n, size_t size, int flags);
ssize_t __recvfrom_chk(int fd, void* buf, size_t n, size_t size, int flags, sockaddr* addr,
                       socklen_t* len);
int __dprintf_chk(int fd, int flag, const char* format, ...);
int __vdprintf_chk(int fd, int flag, const char* format, va_list arguments);
int __poll_chk(pollfd* fds, nfds_t n, int timeout, size_t size);
int __ppoll_chk(pollfd* fds, nfds_t n, const timespec* timeout, const sigset_t* mask, size_t size);
}
