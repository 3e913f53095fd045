// The keeper: the one helper thread of a process, which finds peers and tends lifted streams.
//
// Purpose: everything that must not make the program wait. It runs rendezvous (rendezvous.h),
// watches the TCP sockets and doorbells of lifted streams for their end, answers kicks of peers,
// goes on with replays whose program does nothing, and keeps RSOCK_STRICT's clock. Life: started at
// the first stream that proves worth lifting, absent in every other process; blocks every signal;
// named "rsock-keeper"; dies with fork in the child and is started again there when needed. Not
// started at connect or accept: most connections of a host's programs never carry enough, and a
// child that inherited its connection passes neither. Thread
// safety: the static functions may be called from any thread. Those with _locked or a comment need
// the stream's locks as stated. None of them blocks, but for finish_adopted() and stop().
// The keeper never waits for the peer's program, only for the peer's keeper, and never without a
// timer: that is the deadlock argument of PROTOCOL.md.
#pragma once

#include "core/stream/stream.h"

namespace rsock::stream {

class Keeper {
 public:
  /// s has proved worth lifting. Starts the thread if need be.
  static void ask_for_lift(Stream& s) noexcept;
  /// Tells the peer's keeper to look at the control words. A hint: may be lost, then a timer looks.
  /// tx or rx lock held: the address is the channel's.
  static void kick_peer_locked(Stream& s) noexcept;

  /// Offers the peer a page lane (Channel::tx_offer_lane()). The word may be lost. tx lock held.
  static void offer_lane_locked(Stream& s) noexcept;

  /// Registers the channel's doorbell and the TCP socket. tx and rx locks held.
  static void watch_locked(Stream& s) noexcept;
  /// Forgets the TCP socket and the doorbell. tx and rx locks held.
  static void unwatch_locked(Stream& s) noexcept;
  /// The stream's number for the keeper becomes fd. tx and rx locks held.
  static void move_watch_locked(Stream& s, int fd) noexcept;
  /// Wakes when the TCP socket has room again: a replay waits. tx lock held.
  static void watch_for_room(Stream& s) noexcept;

  /// The program closed fd, but calls of other threads are inside (stay.h): from now on the stream
  /// has a number of ours. False: none to be had. tx and rx locks held.
  static bool hold_locked(Stream& s, int fd) noexcept;
  /// The program closed fd, but a replay is owed: the keeper takes the stream over with a
  /// descriptor of its own. False: no descriptor to be had. tx and rx locks held.
  static bool adopt_locked(Stream& s, int fd) noexcept;
  /// The same without a descriptor: fd stays taken while the closing thread waits. To everybody
  /// else it is one of the library's, and the stream an adopted one. tx and rx locks held.
  static void keep_number_locked(Stream& s, int fd) noexcept;
  /// The wait is over: fd is the caller's to close. tx and rx locks held.
  static void free_number_locked(Stream& s, int fd) noexcept;
  /// The thread that waited for an adopted stream goes; the keeper sees to the rest.
  static void leave_to_keeper() noexcept;
  /// The descriptor of an adopted or held stream that is finished.
  static void give_back(int fd) noexcept;
  /// The channel of s is gone; the stream may be lifted again when it is worth it.
  static void detached(Stream& s) noexcept;
  /// Waits until adopted streams have sent what they owe, at most so long.
  static void finish_adopted(int64_t limit_ns) noexcept;

  /// Ends the thread, if it runs; the next stream that is worth lifting starts it again. Returns
  /// when the kernel has forgotten it, or after a second.
  static void stop() noexcept;
  /// Starts it again if anything is owed that nobody else would see to.
  static void resume() noexcept;
  /// From now on the thread looks whether it is the only one left, and ends the process then: libc
  /// counts it among those that keep it alive.
  static void first_thread_ends() noexcept;

  /// Over a fork the keeper stands still, with nothing half done. Before any lock of a stream.
  static void before_fork() noexcept;
  static void after_fork_parent() noexcept;
  static void after_fork_child() noexcept;
};

}  // namespace rsock::stream
