// Whoever wants to hear that a stream's readiness may have changed: a sleeping poll(), an epoll
// item.
//
// Ownership: intrusive; the watcher belongs to its creator, which unlinks it before it dies.
// Thread safety: linked and unlinked under Stream's watch lock, under which the callbacks also run.
// They may take the lock of an epoll instance and after it tx and rx (lock order: core/DESIGN.md).
#pragma once

#include <boost/intrusive/list.hpp>

namespace rsock::stream {

class Stream;

class Watcher : public boost::intrusive::list_base_hook<
                    boost::intrusive::link_mode<boost::intrusive::safe_link>> {
 public:
  /// Something local changed (a TCP event, a set-down, a shutdown in another thread): look again.
  virtual void on_maybe_ready(Stream& s) noexcept = 0;
  /// A channel was attached to the stream or let go of: what the kernel should watch is different
  /// now. It may unlink itself.
  virtual void on_path_changed(Stream& s) noexcept = 0;
  /// The last descriptor is gone. The watcher has been unlinked just before.
  virtual void on_closed(Stream& s) noexcept = 0;
  /// An epoll registration is the kernel's and both processes'; a sleeping thread is the parent's
  /// alone.
  virtual bool survives_fork() const noexcept { return false; }
  /// In a fork, with every lock held: another process has it too from now on, and the stream stays
  /// on TCP until that process is gone.
  virtual void on_shared_locked() noexcept {}
  /// It is gone, or (`locked`: as above) there is none after all. False: what happened to the
  /// registration meanwhile is not known, and the stream has to stay on TCP.
  virtual bool on_unshared(bool locked) noexcept { return true; }

 protected:
  ~Watcher() = default;
};

}  // namespace rsock::stream
