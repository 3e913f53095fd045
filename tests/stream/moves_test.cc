// The promise of the whole library: a stream moves between TCP and a channel at any byte, in both
// directions at once, from either end, and neither program notices. Thousands of moves under load;
// every byte is compared with what its offset says it must be, and after a half-close the end comes
// exactly behind the last byte.
//
// Bounded by the number of moves, never by time; a hang is ctest's to find (TIMEOUT in
// CMakeLists.txt). RSOCK_TEST_MOVES: moves per stream, for a longer run by hand. RSOCK_TEST_SEED:
// another dice.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "tests/stream/loopback.h"

namespace rsock {
namespace {

using namespace rsock::testing;

constexpr size_t kLargest = 300 * 1024;
constexpr size_t kTile = (1 << 20) + 7;  // odd: no ring size hides a slip

/// An endless known sequence: byte i of direction d is tile[(i + shift(d)) % kTile].
const uint8_t* known_bytes(uint64_t offset, uint32_t direction) {
  static const std::vector<uint8_t> tile = [] {
    std::vector<uint8_t> t(kTile + kLargest);
    std::mt19937_64 random(42);
    for (size_t i = 0; i < kTile; ++i) t[i] = static_cast<uint8_t>(random());
    std::copy_n(t.begin(), kLargest, t.begin() + kTile);
    return t;
  }();
  return tile.data() + (offset + direction * 77'777u) % kTile;
}

uint32_t seed() {
  const char* text = getenv("RSOCK_TEST_SEED");
  static const uint32_t value =
      text != nullptr ? static_cast<uint32_t>(atoi(text)) : std::random_device{}();
  return value;
}

/// Every order of magnitude from 1 byte to kLargest as likely as the next.
size_t random_size(std::mt19937& random) {
  const int bits = static_cast<int>(random() % 19);
  return std::min(kLargest, (size_t{1} << bits) + random() % (size_t{1} << bits));
}

/// One end of a connection with its writer and reader, which may be in another process than the
/// other end.
struct End {
  int fd = -1;
  uint32_t sends = 0;     // direction number of what it writes
  uint32_t receives = 0;  // and of what it reads
  bool nonblocking = false;
  std::atomic<uint64_t> written{0};
  std::atomic<uint64_t> seen{0};
  std::atomic<uint32_t> moves{0};  // set down by this end while its bytes went into a ring
  std::atomic<bool> stop_writing{false};
};

[[noreturn]] void give_up(const End& e, const char* what, long result, uint64_t offset) {
  const Stream* s = FdTable::stream(e.fd);
  fprintf(
      stderr,
      "seed %u, pid %d, fd %d (direction %u in, %u out): %s: result %ld at byte %llu; written "
      "%llu\n"
      "  tx.state %d rx.state %d channel %d error %d tx.offset %llu rx.offset %llu set_downs %u\n",
      seed(), getpid(), e.fd, e.receives, e.sends, what, result,
      static_cast<unsigned long long>(offset), static_cast<unsigned long long>(e.written.load()),
      static_cast<int>(s->tx.state), static_cast<int>(s->rx.state), s->has_channel.load(),
      s->error.load(), static_cast<unsigned long long>(s->tx.offset.load()),
      static_cast<unsigned long long>(s->rx.offset.load()), s->set_downs);
  abort();  // the other threads would wait for ever for what is lost
}

/// Where in the stream the wrong bytes belong, if anywhere near.
void explain(const End& e, const uint8_t* got, size_t n, uint64_t offset) {
  const size_t probe = std::min<size_t>(n, 16);
  for (uint64_t d = 1; d < 3 * kTile / 4; ++d) {
    for (const bool ahead : {true, false}) {
      if (!ahead && d > offset) continue;
      const uint64_t at = ahead ? offset + d : offset - d;
      if (memcmp(got, known_bytes(at, e.receives), probe) != 0) continue;
      fprintf(stderr, "the bytes at %llu are those of %llu (%s by %llu)\n",
              static_cast<unsigned long long>(offset), static_cast<unsigned long long>(at),
              ahead ? "LOST" : "DUPLICATED", static_cast<unsigned long long>(d));
      return;
    }
  }
}

void write_until_told(End& e, uint32_t dice) {
  std::mt19937 random(dice);
  uint64_t at = 0;
  while (!e.stop_writing.load(std::memory_order_relaxed)) {
    const size_t n = random_size(random);
    const bool wait = !e.nonblocking && random() % 4 != 0;
    const long r = do_send(e.fd, known_bytes(at, e.sends), n, wait ? 0 : MSG_DONTWAIT);
    if (r == -EAGAIN && !wait) {
      poll_one(e.fd, POLLOUT);
      continue;
    }
    if (r <= 0 || (wait && r != static_cast<long>(n))) give_up(e, "send", r, at);
    at += static_cast<uint64_t>(r);
    e.written.store(at, std::memory_order_relaxed);
    if (random() % 8 == 0) nap_us(50);  // the keepers need a core now and then, or moves are rare
  }
  if (const long r = do_shutdown(e.fd, SHUT_WR); r != 0) give_up(e, "shutdown", r, at);
}

void check(End& e, const uint8_t* got, size_t n, uint64_t at, const char* what) {
  const uint8_t* want = known_bytes(at, e.receives);
  if (memcmp(got, want, n) == 0) return;
  const size_t i = static_cast<size_t>(std::mismatch(got, got + n, want).first - got);
  explain(e, got + i, n - i, at + i);
  give_up(e, what, static_cast<long>(n), at + i);
}

void read_until_end(End& e, uint32_t dice) {
  std::mt19937 random(dice);
  std::vector<uint8_t> buffer(kLargest);
  uint64_t at = 0;
  for (;;) {
    const size_t n = random_size(random);
    const bool wait = !e.nonblocking && random() % 4 != 0;
    if (!wait && random() % 2 == 0) poll_one(e.fd, POLLIN);
    if (random() % 8 == 0) {
      const long peeked =
          do_recv(e.fd, buffer.data(), std::min<size_t>(n, 4096), MSG_PEEK | MSG_DONTWAIT);
      if (peeked > 0)
        check(e, buffer.data(), static_cast<size_t>(peeked), at, "wrong bytes in a peek");
      if (peeked < 0 && peeked != -EAGAIN) give_up(e, "peek", peeked, at);
    }
    const bool all = wait && random() % 8 == 0;
    const long r =
        do_recv(e.fd, buffer.data(), n, (all ? MSG_WAITALL : 0) | (wait ? 0 : MSG_DONTWAIT));
    if (r == -EAGAIN && !wait) {
      poll_one(e.fd, POLLIN);
      continue;
    }
    if (r < 0) give_up(e, "recv", r, at);
    if (r == 0) break;
    check(e, buffer.data(), static_cast<size_t>(r), at, "wrong bytes");
    at += static_cast<uint64_t>(r);
    e.seen.store(at, std::memory_order_relaxed);
    if (all && r != static_cast<long>(n)) {
      const long next = do_recv(e.fd, buffer.data(), 1);
      if (next != 0) give_up(e, "MSG_WAITALL gave less before the end", r, at);
      break;
    }
  }
  // Once the end was read it stays the end.
  char byte;
  if (const long r = do_recv(e.fd, &byte, 1); r != 0) give_up(e, "a second look at the end", r, at);
}

/// Sets ends down at random moments until each has moved `target` times, then lets the writers
/// finish.
void move_all(std::vector<End*> ends, uint32_t target, uint32_t dice) {
  std::mt19937 random(dice);
  for (size_t finished = 0; finished < ends.size();) {
    finished = 0;
    for (End* e : ends) {
      Stream& s = *FdTable::stream(e->fd);
      // Counts that differ from the kernel's pin a stream to TCP: then it would never move again.
      if (s.pinned.load(std::memory_order_relaxed))
        give_up(*e, s.not_lifted.load(), 0, s.rx.offset.load());
      const bool done = e->moves.load(std::memory_order_relaxed) >= target;
      if (done) {
        ++finished;
        e->stop_writing.store(true, std::memory_order_relaxed);
      } else if (sends_in_ring(s)) {
        e->moves.fetch_add(1, std::memory_order_relaxed);
        stream::set_down(s, "test");
      } else if (random() % 16 == 0) {
        stream::set_down(s, "test, in the middle of a lift or another move");
      }
    }
    // Mostly in the first moments of a lift, sometimes when the rings have been at work for a
    // while.
    nap_us(static_cast<long>(random() % (random() % 8 == 0 ? 12'000 : 1'500)));
  }
}

/// `e` does its part: both threads until the end, with moves from a third.
void run_ends(const std::vector<End*>& ends, uint32_t target, uint32_t salt) {
  std::vector<std::thread> threads;
  for (End* e : ends) {
    if (e->nonblocking) set_nonblocking(e->fd);
    threads.emplace_back([e, salt] { write_until_told(*e, seed() + salt + e->sends); });
    threads.emplace_back([e, salt] { read_until_end(*e, seed() + salt + 1000 + e->receives); });
  }
  move_all(ends, target, seed() + salt + 2000);
  for (std::thread& t : threads) t.join();
}

uint32_t moves_or(uint32_t normal) {
  const char* text = getenv("RSOCK_TEST_MOVES");
  return text != nullptr ? static_cast<uint32_t>(atoi(text)) : normal;
}

struct Load {
  const char* name;
  const char* ring;
  const char* spin;
  size_t streams;
  uint32_t moves;  // per end
};
void PrintTo(const Load& load, std::ostream* out) { *out << load.name; }

class Moves : public ::testing::TestWithParam<Load> {
 protected:
  void SetUp() override { configure({GetParam().ring, GetParam().spin}); }
};

TEST_P(Moves, BothEndsInOneProcessLoseNothing) {
  const uint32_t target = moves_or(GetParam().moves);
  std::vector<Connection> connections;
  std::vector<std::unique_ptr<End>> ends;
  for (uint32_t i = 0; i < GetParam().streams; ++i) {
    connections.push_back(Connection::make());
    for (const uint32_t side : {0u, 1u}) {
      auto e = std::make_unique<End>();
      e->fd = side == 0 ? connections.back().left : connections.back().right;
      e->sends = 2 * i + side;
      e->receives = 2 * i + 1 - side;
      e->nonblocking = (i + side) % 3 == 2;
      ends.push_back(std::move(e));
    }
  }
  std::vector<End*> all;
  for (auto& e : ends) all.push_back(e.get());
  run_ends(all, target, 0);
  uint64_t bytes = 0;
  uint64_t on_rings = 0;  // what was not recalled: a single end may have none
  for (size_t i = 0; i < ends.size(); ++i) {
    EXPECT_EQ(ends[i]->written.load(), ends[i ^ 1]->seen.load()) << "seed " << seed();
    EXPECT_GE(ends[i]->moves.load(), target);
    Stream& s = *FdTable::stream(ends[i]->fd);
    EXPECT_EQ(s.sent[0].load() + s.sent[1].load(), ends[i]->written.load());
    EXPECT_EQ(s.received[0].load() + s.received[1].load(), ends[i]->seen.load());
    bytes += ends[i]->written.load();
    on_rings += s.sent[1].load();
  }
  EXPECT_GT(on_rings, 0u);
  RecordProperty("bytes", std::to_string(bytes));
  printf("%llu MB, of them %llu through rings; %zu ends, %u moves each\n",
         static_cast<unsigned long long>(bytes >> 20),
         static_cast<unsigned long long>(on_rings >> 20), ends.size(), target);
}

TEST_P(Moves, OneEndInEachOfTwoProcessesLosesNothing) {
  const uint32_t target = moves_or(GetParam().moves);
  const size_t n = GetParam().streams;
  sockaddr_in address;
  const int listener = listen_somewhere(&address);
  int report[2];
  ASSERT_EQ(pipe(report), 0);
  stream::prepare_fork();
  stream::before_fork();
  const pid_t child = fork();
  if (child == 0) {
    stream::after_fork_child();
  } else {
    stream::after_fork_parent(child < 0);
  }
  ASSERT_GE(child, 0);
  std::vector<std::unique_ptr<End>> ends;
  std::vector<End*> all;
  for (uint32_t i = 0; i < n; ++i) {
    auto e = std::make_unique<End>();
    e->fd = child == 0 ? connect_stream(address) : accept_stream(listener);
    // Connections arrive in the order in which they were made.
    e->sends = 2 * i + (child == 0 ? 0 : 1);
    e->receives = 2 * i + (child == 0 ? 1 : 0);
    e->nonblocking = (i + (child == 0 ? 0 : 1)) % 3 == 2;
    all.push_back(e.get());
    ends.push_back(std::move(e));
  }
  run_ends(all, target, child == 0 ? 5000 : 0);
  std::vector<uint64_t> counts;
  for (End* e : all) {
    counts.push_back(e->written.load());
    counts.push_back(e->seen.load());
    close_fd(e->fd);
  }
  if (child == 0) {
    stream::before_exit();
    const ssize_t told = ::write(report[1], counts.data(), counts.size() * sizeof(uint64_t));
    _exit(told == static_cast<ssize_t>(counts.size() * sizeof(uint64_t)) ? 0 : 1);
  }
  ::close(report[1]);
  close_fd(listener);
  std::vector<uint64_t> theirs(counts.size());
  ASSERT_EQ(::read(report[0], theirs.data(), theirs.size() * sizeof(uint64_t)),
            static_cast<ssize_t>(theirs.size() * sizeof(uint64_t)))
      << "the other process failed, seed " << seed();
  ::close(report[0]);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "seed " << seed();
  for (size_t i = 0; i < n; ++i) {
    EXPECT_EQ(theirs[2 * i], counts[2 * i + 1]) << "stream " << i << ", seed " << seed();
    EXPECT_EQ(theirs[2 * i + 1], counts[2 * i]) << "stream " << i << ", seed " << seed();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Loads, Moves,
    ::testing::Values(
        Load{"one_stream_small_ring", "RSOCK_RING_BYTES=65536", "RSOCK_SPIN_US=50", 1, 500},
        Load{"four_streams_small_rings", "RSOCK_RING_BYTES=65536", "RSOCK_SPIN_US=0", 4, 150},
        Load{"three_streams_default_rings", "RSOCK_RING_BYTES=1048576", "RSOCK_SPIN_US=50", 3,
             150}),
    [](const ::testing::TestParamInfo<Load>& info) { return info.param.name; });

}  // namespace
}  // namespace rsock
