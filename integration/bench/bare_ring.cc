// The machine's own limit: two processes and a byte ring in shared memory, with nothing around it.
//
//   bare_ring copy  [--ring 1M] [--block 128K] [--chunk 0] [--seconds 1]   GB/s: copy in, copy out
//   bare_ring spin  [--ring 1M] [--size 64] [--seconds 1]       round trip, both ends spinning
//   bare_ring futex [--ring 1M] [--size 64] [--seconds 1]       round trip, both ends sleeping
//
// --ring is the size in one direction (a power of two). --chunk publishes a block in pieces, so
// that the reader may start before the block is complete; 0 publishes whole blocks.

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "bench_util.h"
#include "histogram.h"

namespace {

using bench::die;
using bench::now_ns;

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Lives in memory that both processes map. One writes, the other reads; each keeps a copy of the
// other's index and looks at the shared one only when the copy says "full" or "empty".
struct Control {
  alignas(64) std::atomic<uint64_t> head{0};  // bytes ever written; the writer's
  alignas(64) std::atomic<uint64_t> tail{0};  // bytes ever read; the reader's
  alignas(64) std::atomic<uint32_t> bell{0};  // what a sleeping reader sleeps on
  alignas(64) std::atomic<uint32_t> stop{0};  // set once, by the parent, in ring 0 only
};

class Ring {
 public:
  Ring(Control* control, char* bytes, uint64_t size)
      : control_(control), bytes_(bytes), size_(size) {}

  // Both copy what fits at the moment, up to the ring's end, and return how much that was.
  uint64_t write_some(const char* data, uint64_t wanted) {
    if (size_ - (mine_ - other_) < wanted)
      other_ = control_->tail.load(std::memory_order_acquire);  // pairs with read_some's release
    uint64_t at = mine_ & (size_ - 1);
    uint64_t part = std::min({wanted, size_ - (mine_ - other_), size_ - at});
    if (part == 0) return 0;
    std::memcpy(bytes_ + at, data, part);
    mine_ += part;
    // Pairs with read_some's acquire: the bytes are visible before the index that covers them.
    control_->head.store(mine_, std::memory_order_release);
    return part;
  }

  uint64_t read_some(char* data, uint64_t wanted) {
    if (other_ - mine_ < wanted)
      other_ = control_->head.load(std::memory_order_acquire);  // pairs with write_some's release
    uint64_t at = mine_ & (size_ - 1);
    uint64_t part = std::min({wanted, other_ - mine_, size_ - at});
    if (part == 0) return 0;
    std::memcpy(data, bytes_ + at, part);
    mine_ += part;
    // Pairs with write_some's acquire: our copy is complete before the space is used again.
    control_->tail.store(mine_, std::memory_order_release);
    return part;
  }

  void ring_bell() {
    control_->bell.fetch_add(1, std::memory_order_release);  // pairs with sleep_until_bell
    syscall(SYS_futex, &control_->bell, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }

  // Sleeps until the bell has rung more often than `heard`; updates it.
  void sleep_until_bell(uint32_t& heard) {
    while (control_->bell.load(std::memory_order_acquire) == heard) {  // pairs with ring_bell
      if (syscall(SYS_futex, &control_->bell, FUTEX_WAIT, heard, nullptr, nullptr, 0) != 0 &&
          errno != EAGAIN && errno != EINTR)
        die("futex");
    }
    ++heard;
  }

  Control* control() { return control_; }

 private:
  Control* control_;
  char* bytes_;
  uint64_t size_;
  uint64_t mine_ = 0;   // our own index
  uint64_t other_ = 0;  // the copy of the other side's
};

// The two rings as one of the two processes sees them. `stop` is checked by every waiting loop, so
// neither process outlives the measurement.
class Peer {
 public:
  Peer(Ring out, Ring in, std::atomic<uint32_t>* stop) : out_(out), in_(in), stop_(stop) {}

  bool stopped() const { return stop_->load(std::memory_order_relaxed) != 0; }

  bool write_all(const char* data, uint64_t size) {
    while (size > 0) {
      uint64_t part = out_.write_some(data, size);
      if (part == 0 && !wait()) return false;
      data += part;
      size -= part;
    }
    return true;
  }

  bool read_all(char* data, uint64_t size) {
    while (size > 0) {
      uint64_t part = in_.read_some(data, size);
      if (part == 0 && !wait()) return false;
      data += part;
      size -= part;
    }
    return true;
  }

  Ring& out() { return out_; }
  Ring& in() { return in_; }

 private:
  bool wait() {
    cpu_relax();
    // With fewer free cores than spinners the other side needs ours.
    if (++spins_ % 4096 == 0) syscall(SYS_sched_yield);
    return !stopped();
  }

  Ring out_;
  Ring in_;
  std::atomic<uint32_t>* stop_;
  uint64_t spins_ = 0;
};

struct Shared {
  Control* control[2];
  char* bytes[2];
};

Shared map_rings(uint64_t size) {
  uint64_t control_size = (2 * sizeof(Control) + 4095) & ~uint64_t{4095};
  void* memory = mmap(nullptr, control_size + 2 * size, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) die("mmap");
  std::memset(memory, 0, control_size + 2 * size);  // page faults are not what we measure
  char* start = static_cast<char*>(memory);
  auto* control = reinterpret_cast<Control*>(start);
  return {{new (control) Control, new (control + 1) Control},
          {start + control_size, start + control_size + size}};
}

struct Options {
  uint64_t ring, block, chunk, size;
  double seconds;
};

// ---- the three measurements: what the child does, what the parent does
// ---------------------------

// A number in the first and the last bytes of each block proves that whole blocks arrive in order.
void stamp(std::vector<char>& block, uint64_t number) {
  std::memcpy(block.data(), &number, sizeof number);
  std::memcpy(block.data() + block.size() - sizeof number, &number, sizeof number);
}

void check_stamp(const std::vector<char>& block, uint64_t number) {
  // The compiler must believe that somebody reads every byte; it could leave out the copy if only
  // the stamps were used.
  asm volatile("" : : "r"(block.data()) : "memory");
  if (std::memcmp(block.data(), &number, sizeof number) != 0 ||
      std::memcmp(block.data() + block.size() - sizeof number, &number, sizeof number) != 0)
    bench::die_plain("bare_ring: block " + std::to_string(number) + " is not what was sent");
}

void copy_child(Peer& peer, const Options& options) {
  std::vector<char> block(options.block, 'b');
  uint64_t chunk = options.chunk == 0 ? options.block : options.chunk;
  for (uint64_t number = 0; !peer.stopped(); ++number) {
    stamp(block, number);
    for (uint64_t at = 0; at < block.size(); at += chunk) {
      if (!peer.write_all(block.data() + at, std::min(chunk, block.size() - at))) return;
    }
  }
}

void copy_parent(Peer& peer, const Options& options) {
  std::vector<char> block(options.block);
  uint64_t chunk = options.chunk == 0 ? options.block : options.chunk;
  uint64_t number = 0;
  auto read_block = [&] {
    for (uint64_t at = 0; at < block.size(); at += chunk)
      peer.read_all(block.data() + at, std::min(chunk, block.size() - at));
    check_stamp(block, number++);
  };
  const uint64_t warm_until = now_ns() + static_cast<uint64_t>(bench::kWarmupSeconds * 1e9);
  while (now_ns() < warm_until) read_block();
  const uint64_t start = now_ns();
  const uint64_t end = start + static_cast<uint64_t>(options.seconds * 1e9);
  uint64_t blocks = 0, now;
  do {
    read_block();
    ++blocks;
    now = now_ns();
  } while (now < end);
  double elapsed = static_cast<double>(now - start) / 1e9;
  double rate = static_cast<double>(blocks * options.block) / elapsed;
  bench::JsonLine("bare_ring")
      .add("test", "copy")
      .add("ring", options.ring)
      .add("block", options.block)
      .add("chunk", chunk)
      .add("seconds", elapsed)
      .add("bytes_per_s", rate)
      .add("gbit_per_s", rate * 8 / 1e9)
      .print();
}

void ping_child(Peer& peer, const Options& options, bool sleeping) {
  std::vector<char> message(options.size);
  uint32_t heard = 0;
  for (;;) {
    if (sleeping) peer.in().sleep_until_bell(heard);
    if (peer.stopped() || !peer.read_all(message.data(), message.size())) return;
    if (!peer.write_all(message.data(), message.size())) return;
    if (sleeping) peer.out().ring_bell();
  }
}

void ping_parent(Peer& peer, const Options& options, bool sleeping) {
  std::vector<char> out(options.size, 'p'), in(options.size);
  uint32_t heard = 0;
  auto round_trip = [&] {
    ++out[0];
    peer.write_all(out.data(), out.size());
    if (sleeping) {
      peer.out().ring_bell();
      peer.in().sleep_until_bell(heard);
    }
    peer.read_all(in.data(), in.size());
    if (in[0] != out[0]) bench::die_plain("bare_ring: the echo is not what was sent");
  };
  const uint64_t warm_until = now_ns() + static_cast<uint64_t>(bench::kWarmupSeconds * 1e9);
  while (now_ns() < warm_until) round_trip();
  bench::Histogram times;
  const uint64_t start = now_ns();
  const uint64_t end = start + static_cast<uint64_t>(options.seconds * 1e9);
  uint64_t last = start;
  while (last < end) {
    round_trip();
    uint64_t now = now_ns();
    times.add(now - last);
    last = now;
  }
  bench::JsonLine("bare_ring")
      .add("test", sleeping ? "futex" : "spin")
      .add("ring", options.ring)
      .add("size", options.size)
      .add("messages", times.count())
      .add("mean_us", times.mean() / 1e3)
      .add("p50_us", static_cast<double>(times.quantile(0.50)) / 1e3)
      .add("p99_us", static_cast<double>(times.quantile(0.99)) / 1e3)
      .print();
}

}  // namespace

int main(int argc, char** argv) {
  std::string test = argc > 1 ? argv[1] : "";
  if (test != "copy" && test != "spin" && test != "futex")
    bench::die_usage("usage: bare_ring copy|spin|futex [--name value]...");
  bench::Args args(argc, argv, 2);
  Options options{args.size("--ring", 1 << 20), args.size("--block", 128 << 10),
                  args.size("--chunk", 0), args.size("--size", 64), args.real("--seconds", 1)};
  args.finish();
  if (options.ring < 4096 || (options.ring & (options.ring - 1)) != 0 || options.block < 16 ||
      options.size == 0 || options.size > options.ring)
    bench::die_usage("bare_ring: --ring is a power of two and holds a message");

  Shared shared = map_rings(options.ring);
  std::atomic<uint32_t>* stop = &shared.control[0]->stop;
  Ring there(shared.control[0], shared.bytes[0], options.ring);
  Ring back(shared.control[1], shared.bytes[1], options.ring);

  pid_t parent = getpid();
  pid_t child = fork();
  if (child < 0) die("fork");
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    Peer peer(back, there, stop);
    if (test == "copy")
      copy_child(peer, options);
    else
      ping_child(peer, options, test == "futex");
    _exit(0);
  }
  Peer peer(there, back, stop);
  if (test == "copy")
    copy_parent(peer, options);
  else
    ping_parent(peer, options, test == "futex");
  stop->store(1, std::memory_order_relaxed);  // a flag that loops poll; it orders nothing
  there.ring_bell();
  if (waitpid(child, nullptr, 0) != child) die("waitpid");
  return 0;
}
