#include "core/transport/fake/fake_channel.h"

#include <sys/syscall.h>

#include <climits>
#include <vector>

#include "core/base/check.h"
#include "core/base/mutex.h"
#include "core/os/os.h"
#include "core/transport/bell.h"
#include "core/os/owned_fd.h"
#include "core/ring/byte_ring.h"

namespace rsock::transport {
namespace {

using std::memory_order_acquire;
using std::memory_order_release;
using std::memory_order_seq_cst;

/// Control words as one end knows them.
struct Words {
  std::atomic<uint64_t> start{0};
  std::atomic<uint32_t> ready{0};
  std::atomic<uint32_t> replayed{0};
};

/// One end's ring of one direction.
struct Half {
  explicit Half(size_t capacity) : bytes(capacity) {}
  std::vector<std::byte> bytes;
  std::atomic<uint64_t> tail{0};
  std::atomic<uint64_t> head{0};
  Words words;
};

struct Direction {
  explicit Direction(size_t capacity) : sender(capacity), receiver(capacity) {}
  Half sender;
  Half receiver;
  std::atomic<uint32_t> rx_sleep{0}, rx_bell{0}, tx_sleep{0}, tx_bell{0};
};

Turn turn_of(const Half& half) noexcept {
  // acquire pairs with whoever sealed the head: the tail of an end is visible with it.
  const uint64_t head = half.head.load(memory_order_acquire);
  // acquire: as above; if it ended, the tail is final.
  return wire::turn_of(head, half.tail.load(memory_order_acquire));
}

class Link final : public FakeLink {
 public:
  explicit Link(const FakeOptions& options)
      : capacity_(options.capacity),
        hold_bytes_(options.hold_bytes),
        hold_credits_(options.hold_credits),
        directions_{Direction(options.capacity), Direction(options.capacity)} {}

  size_t capacity() const noexcept { return capacity_; }
  Direction& direction(int sender) noexcept { return directions_[sender]; }
  // acquire pairs with fail(): what the path did before it broke is visible.
  bool failed() const noexcept { return failed_.load(memory_order_acquire); }

  void hold_bytes(bool hold) noexcept override {
    MutexLock lock(mutex_);
    hold_bytes_ = hold;
  }
  void hold_credits(bool hold) noexcept override {
    MutexLock lock(mutex_);
    hold_credits_ = hold;
  }
  size_t pump_bytes(FakeSide sender, size_t limit) noexcept override {
    MutexLock lock(mutex_);
    return deliver_locked(static_cast<int>(sender), limit);
  }
  void pump_credits(FakeSide sender) noexcept override {
    MutexLock lock(mutex_);
    credit_locked(static_cast<int>(sender));
  }
  void pump() noexcept override {
    MutexLock lock(mutex_);
    for (int sender : {0, 1}) {
      deliver_locked(sender, SIZE_MAX);
      credit_locked(sender);
    }
  }
  void fail() noexcept override;

  // Called by the ends.
  void published(int sender) noexcept {
    MutexLock lock(mutex_);
    if (!hold_bytes_) deliver_locked(sender, SIZE_MAX);
  }
  void released(int sender) noexcept {
    MutexLock lock(mutex_);
    if (!hold_credits_) credit_locked(sender);
  }
  Turn seal(int sender, ring::RingWriter& writer, uint64_t bit) noexcept;
  Turn freeze(int sender, ring::RingReader& reader) noexcept;
  /// Runs `set` on the own words, and on the other end's while the path is up.
  template <typename Set>
  void control(Half& own, Half& other, Set set) noexcept {
    MutexLock lock(mutex_);
    set(own.words);
    if (!failed()) set(other.words);
  }
  void attach(int side, int doorbell) noexcept {
    MutexLock lock(mutex_);
    doorbells_[side] = doorbell;
  }
  void wake_peer(int side) noexcept;

 private:
  size_t deliver_locked(int sender, size_t limit) noexcept RSOCK_REQUIRES(mutex_);
  void credit_locked(int sender) noexcept RSOCK_REQUIRES(mutex_);
  void wake_locked(std::atomic<uint32_t>& sleep, std::atomic<uint32_t>& bell, int side) noexcept
      RSOCK_REQUIRES(mutex_);
  void ring_locked(int side) noexcept RSOCK_REQUIRES(mutex_);

  Mutex mutex_;
  const size_t capacity_;
  bool hold_bytes_ RSOCK_GUARDED_BY(mutex_);
  bool hold_credits_ RSOCK_GUARDED_BY(mutex_);
  std::atomic<bool> failed_{false};
  int doorbells_[2] RSOCK_GUARDED_BY(mutex_) = {-1, -1};
  Direction directions_[2];
};

void Link::ring_locked(int side) noexcept {
  // A byte sent by one end of the pair makes the other one's readable. The other one may be gone.
  const char ring = 1;
  const int from = doorbells_[1 - side];
  if (from >= 0) (void)os::send(from, &ring, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void Link::wake_locked(std::atomic<uint32_t>& sleep, std::atomic<uint32_t>& bell,
                       int side) noexcept {
  // seq_cst: Dekker with rx_arm() and tx_arm(), as in byte_ring.h.
  if (sleep.load(memory_order_seq_cst) == 0) return;
  const uint32_t bits = sleep.exchange(0, memory_order_seq_cst);
  if ((bits & wire::kSleepFutex) != 0) strike(bell);
  if ((bits & wire::kSleepDoorbell) != 0) ring_locked(side);
}

size_t Link::deliver_locked(int sender, size_t limit) noexcept {
  if (failed()) return 0;
  Direction& d = directions_[sender];
  // acquire pairs with RingWriter::write(). The receiver's tail is ours alone.
  const uint64_t to = d.sender.tail.load(memory_order_acquire);
  const uint64_t from = d.receiver.tail.load(std::memory_order_relaxed);
  const size_t n = std::min<uint64_t>(limit, to - from);
  for (uint64_t at = from; at < from + n; ++at) {
    const size_t i = at & (capacity_ - 1);
    d.receiver.bytes[i] = d.sender.bytes[i];
  }
  if (n == 0) return 0;
  // As RingWriter::write(): release for the bytes, seq_cst for Dekker.
  d.receiver.tail.exchange(from + n, memory_order_seq_cst);
  wake_locked(d.rx_sleep, d.rx_bell, 1 - sender);
  return n;
}

void Link::credit_locked(int sender) noexcept {
  if (failed()) return;
  Direction& d = directions_[sender];
  // acquire pairs with RingReader::move_head(); the exchange as there.
  const uint64_t head = d.receiver.head.load(memory_order_acquire);
  d.sender.head.exchange(head, memory_order_seq_cst);
  // acquire: as in deliver_locked(). Room counts from what the sender published, delivered or not.
  const uint64_t used = d.sender.tail.load(memory_order_acquire) - (head & ring::kCountMask);
  if (capacity_ - used >= capacity_ / 3) wake_locked(d.tx_sleep, d.tx_bell, sender);
}

Turn Link::seal(int sender, ring::RingWriter& writer, uint64_t bit) noexcept {
  MutexLock lock(mutex_);
  Direction& d = directions_[sender];
  if (failed()) {
    (void)writer.seal(bit);
    return turn_of(d.sender);
  }
  if (bit == ring::kSealEnded) deliver_locked(sender, SIZE_MAX);
  // seq_cst pairs with RingReader::move_head(): the count that comes back is exact.
  const uint64_t before = d.receiver.head.fetch_or(bit, memory_order_seq_cst);
  (void)writer.seal(bit);
  // release pairs with turn_of().
  d.sender.head.store(before | bit, memory_order_release);
  return turn_of(d.sender);
}

Turn Link::freeze(int sender, ring::RingReader& reader) noexcept {
  MutexLock lock(mutex_);
  Direction& d = directions_[sender];
  // release pairs with turn_of().
  const uint64_t now = reader.freeze();
  if (!failed()) d.sender.head.store(now, memory_order_release);
  return turn_of(d.receiver);
}

void Link::fail() noexcept {
  MutexLock lock(mutex_);
  failed_.store(true, memory_order_release);  // pairs with failed()
  for (Direction& d : directions_) {
    strike(d.rx_bell);
    strike(d.tx_bell);
  }
  for (int fd : doorbells_) {
    if (fd >= 0) (void)os::shutdown(fd, SHUT_RDWR);
  }
}

void Link::wake_peer(int side) noexcept {
  MutexLock lock(mutex_);
  if (failed()) return;
  strike(directions_[side].rx_bell);
  strike(directions_[1 - side].tx_bell);
  ring_locked(1 - side);
}

class FakeChannel final : public Channel {
 public:
  FakeChannel(std::shared_ptr<Link> link, int side, PathKind kind, os::OwnedFd doorbell)
      : link_(std::move(link)),
        side_(side),
        kind_(kind),
        doorbell_(std::move(doorbell)),
        tx_(link_->direction(side)),
        rx_(link_->direction(1 - side)),
        writer_(tx_.sender.bytes.data(), link_->capacity(), tx_.sender.tail, tx_.sender.head),
        reader_(rx_.receiver.bytes.data(), link_->capacity(), rx_.receiver.tail,
                rx_.receiver.head) {
    link_->attach(side_, doorbell_.get());
  }
  ~FakeChannel() override { link_->attach(side_, -1); }

  PathKind kind() const noexcept override { return kind_; }
  size_t capacity() const noexcept override { return link_->capacity(); }

  size_t tx_room(size_t want) noexcept override { return link_->failed() ? 0 : writer_.room(want); }
  size_t tx_write(const iovec* iov, size_t n, size_t skip, size_t limit) noexcept override {
    if (link_->failed()) return 0;
    ring::IovCursor from(iov, n, skip);
    const size_t done = writer_.write(from, limit);
    if (from.faulted()) return kFault;
    if (done != 0) link_->published(side_);
    return done;
  }
  size_t tx_fill(ByteSource& from, size_t limit) noexcept override {
    if (link_->failed()) return 0;
    const size_t done = writer_.write(from, limit);
    if (done != 0) link_->published(side_);
    return done;
  }
  size_t tx_put(const void* from, size_t n) noexcept override {
    if (link_->failed()) return 0;
    const size_t done = writer_.put(from, n);
    if (done != 0) link_->published(side_);
    return done;
  }
  uint64_t tx_unread() noexcept override { return writer_.unread(); }
  uint64_t tx_tail() noexcept override { return writer_.tail(); }
  size_t tx_unread_spans(uint64_t from, size_t n, iovec spans[2]) noexcept override {
    return writer_.unread_spans(from, n, spans);
  }
  bool tx_failed() const noexcept override { return link_->failed() || writer_.failed(); }

  size_t rx_available() noexcept override { return reader_.available(); }
  size_t rx_read(const iovec* iov, size_t n, size_t skip, size_t limit,
                 bool peek) noexcept override {
    ring::IovCursor to(iov, n, skip);
    const size_t done = peek ? reader_.peek(to, limit) : reader_.read(to, limit);
    if (to.faulted()) return kFault;
    if (peek) return done;
    if (done != 0) link_->released(1 - side_);
    return done;
  }
  size_t rx_take(void* to, size_t n) noexcept override {
    const size_t done = reader_.take(to, n);
    if (done != 0) link_->released(1 - side_);
    return done;
  }
  size_t rx_discard(size_t n) noexcept override {
    const size_t done = reader_.discard(n);
    if (done != 0) link_->released(1 - side_);
    return done;
  }
  uint64_t rx_head() noexcept override { return reader_.head(); }
  uint64_t rx_published() noexcept override {
    // acquire: as any look at the tail.
    return rx_.receiver.tail.load(memory_order_acquire);
  }
  bool rx_failed() const noexcept override { return link_->failed() || reader_.failed(); }

  // Stores are release, loads acquire: each pairs with the same word of the other end.
  void tx_set_start(uint64_t stream_offset) noexcept override {
    link_->control(tx_.sender, tx_.receiver,
                   [=](Words& w) { w.start.store(stream_offset + 1, memory_order_release); });
  }
  std::optional<uint64_t> rx_start() noexcept override {
    const uint64_t word = rx_.receiver.words.start.load(memory_order_acquire);
    if (word == 0) return std::nullopt;
    return word - 1;
  }
  void rx_set_ready() noexcept override {
    link_->control(rx_.receiver, rx_.sender,
                   [](Words& w) { w.ready.store(1, memory_order_release); });
  }
  bool tx_peer_ready() noexcept override {
    return tx_.sender.words.ready.load(memory_order_acquire) != 0;
  }
  void tx_set_replayed() noexcept override {
    link_->control(tx_.sender, tx_.receiver,
                   [](Words& w) { w.replayed.store(1, memory_order_release); });
  }
  bool rx_replayed() noexcept override {
    return rx_.receiver.words.replayed.load(memory_order_acquire) != 0;
  }
  Turn tx_turn() noexcept override { return turn_of(tx_.sender); }
  bool tx_maybe_turned() noexcept override { return tx_turn().kind != TurnKind::kOpen; }
  Turn rx_turn() noexcept override { return turn_of(rx_.receiver); }
  Turn tx_end() noexcept override { return seal(ring::kSealEnded); }
  Turn tx_recall() noexcept override { return seal(ring::kSealFrozen); }
  Turn rx_freeze() noexcept override { return link_->freeze(1 - side_, reader_); }

  // Bells and sleep words: orders and partners as in ShmChannel.
  uint32_t rx_bell() noexcept override { return rx_.rx_bell.load(memory_order_acquire); }
  uint32_t tx_bell() noexcept override { return tx_.tx_bell.load(memory_order_acquire); }
  void rx_arm(Sleep how) noexcept override {
    rx_.rx_sleep.fetch_or(static_cast<uint32_t>(how), memory_order_seq_cst);
  }
  void tx_arm(Sleep how) noexcept override {
    tx_.tx_sleep.fetch_or(static_cast<uint32_t>(how), memory_order_seq_cst);
  }
  Result<void> rx_sleep(uint32_t seen, const timespec* timeout) noexcept override {
    return sleep_on(rx_.rx_bell, seen, timeout);
  }
  Result<void> tx_sleep(uint32_t seen, const timespec* timeout) noexcept override {
    return sleep_on(tx_.tx_bell, seen, timeout);
  }
  void wake_local() noexcept override {
    strike(rx_.rx_bell);
    strike(tx_.tx_bell);
  }
  void wake_peer() noexcept override { link_->wake_peer(side_); }
  int wait_fd() const noexcept override { return doorbell_.get(); }
  bool drain_wait_fd() noexcept override {
    char rings[256];
    bool any = false;
    for (int i = 0; i < 4; ++i) {
      const Result<size_t> n = os::recv(doorbell_.get(), rings, sizeof(rings), MSG_DONTWAIT);
      if (n && *n > 0) any = true;
      if (!n || *n < sizeof(rings)) break;
    }
    return any;
  }
  void let_go() noexcept override { (void)os::shutdown(doorbell_.get(), SHUT_RDWR); }

 private:
  Turn seal(uint64_t bit) noexcept {
    if (over_.kind == TurnKind::kOpen) over_ = link_->seal(side_, writer_, bit);
    return over_;
  }

  const std::shared_ptr<Link> link_;
  const int side_;
  const PathKind kind_;
  const os::OwnedFd doorbell_;
  Direction& tx_;
  Direction& rx_;
  ring::RingWriter writer_;
  Turn over_;
  ring::RingReader reader_;
};

}  // namespace

Result<FakePair> make_fake_pair(const FakeOptions& options) {
  RSOCK_CHECK(options.capacity != 0 && (options.capacity & (options.capacity - 1)) == 0);
  int fds[2];
  // No wrapper: production makes no socket pairs.
  const long r = os::door()(SYS_socketpair, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0,
                            reinterpret_cast<long>(fds), 0, 0);
  if (r < 0) return fail(static_cast<int>(-r));
  auto link = std::make_shared<Link>(options);
  FakePair pair;
  pair.link = link;
  pair.caller = std::make_unique<FakeChannel>(link, 0, options.kind, os::OwnedFd(fds[0]));
  pair.callee = std::make_unique<FakeChannel>(link, 1, options.kind, os::OwnedFd(fds[1]));
  return pair;
}

}  // namespace rsock::transport
