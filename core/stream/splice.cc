// splice: bytes between a stream and a pipe, as relays move them. The kernel while the gate is
// open, else by copies: a ring's memory is used again, so no pipe can keep it.
//
// Nothing may be taken that can't be put down: from a pipe only what the ring has room for, from
// the ring only what the pipe has room for.

#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>

#include <algorithm>

#include "core/base/deadline.h"
#include "core/os/os.h"
#include "core/stream/bell_sleep.h"
#include "core/stream/bounce_buffer.h"
#include "core/stream/send_steps.h"
#include "core/stream/socket_ops.h"
#include "core/stream/stay.h"

namespace rsock::stream {
namespace {

constexpr size_t kMost = 0x7ffff000;  // MAX_RW_COUNT

/// What a pipe has now, `most` bytes of it.
class PipeSource final : public transport::ByteSource {
 public:
  PipeSource(int pipe, size_t most) noexcept : pipe_(pipe), left_(most) {}

  size_t gather(std::byte* to, size_t limit) noexcept override {
    limit = std::min(limit, left_);
    // Another reader may have been here: a read of an empty pipe would wait, under the stream's
    // lock.
    if (at_end()) return 0;
    const auto got = os::read(pipe_, to, limit);
    const size_t n = got ? *got : 0;
    left_ -= n;
    ended_ = n < limit;
    return n;
  }
  bool done() const noexcept override { return ended_ || left_ == 0; }
  bool at_end() noexcept override {
    if (!done()) ended_ = (os::poll_now(pipe_, POLLIN) & POLLIN) == 0;
    return done();
  }

 private:
  const int pipe_;
  size_t left_;
  bool ended_ = false;
};

/// The program lets a splice wait for its pipe (do_splice() in fs/splice.c).
bool may_wait_for_pipe(int pipe, unsigned flags) noexcept {
  const auto status = os::fcntl(pipe, F_GETFL);
  return (flags & SPLICE_F_NONBLOCK) == 0 && (!status || (*status & O_NONBLOCK) == 0);
}

/// Bytes that a write to the pipe takes at once, for sure: all of it where it is empty, else one of
/// its pages, which may be many or few bytes each. 0: none now. -errno.
long room_of(int pipe) noexcept {
  const short events = os::poll_now(pipe, POLLOUT);
  if ((events & POLLNVAL) != 0) return -EBADF;
  if ((events & POLLERR) != 0) return -EPIPE;
  if ((events & POLLOUT) == 0) return 0;
  constexpr long kPage = 4096;
  const auto queued = os::ioctl_int(pipe, FIONREAD);
  const auto size = os::fcntl(pipe, F_GETPIPE_SZ);
  return queued && *queued == 0 && size ? std::max<long>(*size, kPage) : kPage;
}

/// All of it, whoever writes beside us.
long write_out(int pipe, const char* from, size_t n) noexcept {
  for (size_t done = 0; done < n;) {
    const auto wrote = os::write(pipe, from + done, n - done);
    if (wrote) {
      done += *wrote;
    } else if (wrote.error() == EAGAIN) {
      const HandlerWatch since;
      (void)sleep_in_kernel(pipe, POLLOUT, Deadline::from_option(0), since, false);
    } else if (wrote.error() != EINTR) {
      return -value(wrote.error());
    }
  }
  return static_cast<long>(n);
}

/// How a managed call ends that met this.
long send_error(Stream& s, long error) noexcept {
  if (error == -EPROTO) {
    fail_stream(s, failure_of(s));
    const int e = take_error(s);
    error = e != 0 ? -e : -EPIPE;
  }
  if (error == -EPIPE) os::raise_here(SIGPIPE);
  return error;
}

}  // namespace

long splice_in(Stream& s, int fd, int pipe, size_t n, unsigned flags, KernelCall kernel) {
  const bool pipe_waits = may_wait_for_pipe(pipe, flags);
  const int send_flags = (flags & SPLICE_F_MORE) != 0 ? MSG_MORE : 0;
  Stay stay(s);
  HandlerWatch since;
  for (;;) {
    if (stay.noted() && FdTable::stream(fd) != &s) return -EBADF;
    if (const auto r = send_by_kernel(s, 0, kernel)) return *r;
    if (s.tx.mutex.held_by_me()) return -EAGAIN;
    const auto queued = os::ioctl_int(pipe, FIONREAD);
    if (!queued) return -value(queued.error());
    if (*queued == 0) {
      if ((os::poll_now(pipe, POLLIN) & (POLLIN | POLLHUP)) == POLLHUP) return 0;
      if (!pipe_waits) return -EAGAIN;
      since.begin_again();
      const long e = sleep_in_kernel(pipe, POLLIN, Deadline::from_option(0), since, false);
      if (e != 0) return e;
      continue;
    }
    const size_t total = std::min({n, kMost, static_cast<size_t>(*queued)});
    PipeSource from(pipe, total);
    size_t done = 0;
    long error = 0;
    bool fin = false;
    const Step step =
        send_managed(s, stay, {.file = &from}, total, &done, send_flags, &error, &fin);
    if (step == Step::kKernel) maybe_detach(s);
    if (done != 0) return static_cast<long>(done);
    if (step == Step::kError) return send_error(s, error);
    if (step == Step::kKernel && fin) return kernel();
  }
}

long splice_out(Stream& s, int fd, int pipe, size_t n, unsigned flags, KernelCall kernel) {
  const bool pipe_waits = may_wait_for_pipe(pipe, flags);
  const BounceBuffer buffer;
  if (buffer.data() == nullptr) return -ENOMEM;
  HandlerWatch since;
  for (;;) {
    if (FdTable::stream(fd) != &s) return -EBADF;
    if (const auto r = recv_by_kernel(s, 0, kernel)) return *r;
    if (s.rx.mutex.held_by_me()) return -EAGAIN;
    const long room = room_of(pipe);
    if (room == -EPIPE) os::raise_here(SIGPIPE);
    if (room < 0) return room;
    if (room == 0) {
      if (!pipe_waits) return -EAGAIN;
      since.begin_again();
      const long e = sleep_in_kernel(pipe, POLLOUT, Deadline::from_option(0), since, false);
      if (e != 0) return e;
      continue;
    }
    const size_t want = std::min({n, static_cast<size_t>(room), BounceBuffer::kSize});
    const iovec iov{buffer.data(), want};
    const long got = recv(s, fd, &iov, 1, 0, [&]() -> long {
      const auto r = os::recv(fd, buffer.data(), want, 0);
      return r ? static_cast<long>(*r) : -value(r.error());
    });
    return got <= 0
               ? got
               : write_out(pipe, static_cast<const char*>(buffer.data()), static_cast<size_t>(got));
  }
}

}  // namespace rsock::stream
