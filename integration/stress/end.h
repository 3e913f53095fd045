// One end of one life: what it still has to send and to receive, and the calls that do it.
//
// Thread safety: read_some() and write_some() by one thread each at a time. Movers touch the
// descriptors under a shared lock of `fds`; close_all() takes it alone. What counts bytes lies in
// memory that forked children share.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "stress.h"

namespace stress {

enum class Step { kMoved, kBlocked, kOver };

/// Of one end; in shared memory.
struct Progress {
  std::atomic<bool> used{false};
  std::atomic<uint64_t> sent{0}, received{0};
  std::atomic<bool> eof{false}, shut{false}, broken{false};
};

class End {
 public:
  End(int fd, bool client, Plan plan);
  ~End();
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  const Plan plan;
  const bool client;
  int fd;                                  // reads
  int write_fd;                            // writes: the same, or a copy
  const bool quiet, nonblocking, toggles;  // toggles: movers set and clear O_NONBLOCK
  std::shared_mutex fds;
  Doing* doing;         // of the reader, or of both directions
  Doing* writer_doing;  // of the writer, where it is another thread
  Progress& at;

  /// One call. `wait`: one that blocks. `*drained`: it gave less than was asked for, so nothing is
  /// left.
  Step read_some(Random& random, bool wait, bool* drained);
  Step write_some(Random& random, bool wait);

  bool reading() const { return !at.eof && !at.broken; }
  bool writing() const { return !at.shut && !at.broken; }
  uint64_t total_out() const { return client ? plan.client_total : plan.server_total; }
  uint64_t total_in() const { return client ? plan.server_total : plan.client_total; }
  uint64_t may_send() const { return turn_limit(client, at.received); }  // up to where
  bool wants_out() const { return writing() && (at.sent < may_send() || must_shut()); }
  /// The writer waits until it may send again, or nothing is left to send.
  void wait_for_turn();
  void close_all();

 private:
  uint64_t turn_limit(bool of_client, uint64_t received_by_it) const;
  bool must_shut() const { return at.sent == total_out() && !at.shut; }
  bool ends_rudely();
  Step error(int error, const char* what);
  void moved();
  void check(const uint8_t* data, size_t size, const char* call);
  void set_out_of_band_inline();
  size_t turn_of(uint64_t received) const;

  std::mutex turn_;
  std::condition_variable turned_;
  std::atomic<bool> inline_{false};
  bool abandoned_ = false;
};

/// The known bytes as a file, for sendfile().
int known_file();

/// For movers, and for the dump.
void publish(const std::shared_ptr<End>& end);
void withdraw(const End* end);
std::shared_ptr<End> random_end(Random& random);
void dump_ends();

}  // namespace stress
