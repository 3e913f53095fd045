#include "core/stream/counters.h"

#include <fcntl.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "core/base/config.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/transport/verbs/queue_pair.h"

namespace rsock::stream {
namespace {

struct ReasonCount {
  Reason reason;
  uint64_t count;
};

/// Fixed size: reasons are literals, there are some dozens of them.
constexpr size_t kMaxReasons = 64;

struct Totals {
  uint64_t streams = 0;
  uint64_t lifted[kPaths] = {};
  uint64_t set_down = 0;
  uint64_t sent[kPaths] = {};
  uint64_t received[kPaths] = {};
  uint64_t zero_copied = 0;
  ReasonCount not_lifted[kMaxReasons] = {};
  ReasonCount refused[kMaxReasons] = {};
  ReasonCount set_down_for[kMaxReasons] = {};
};

Mutex g_mutex;
Totals g_totals RSOCK_GUARDED_BY(g_mutex);
enum class Written : int { kNo, kBeing, kYes };
std::atomic<Written> g_written{Written::kNo};

void bump(ReasonCount* list, Reason reason) noexcept {
  for (size_t i = 0; i < kMaxReasons; ++i) {
    if (list[i].reason == nullptr) list[i].reason = reason;
    if (list[i].reason == reason || strcmp(list[i].reason, reason) == 0) {
      ++list[i].count;
      return;
    }
  }
}

void add_stream(const Stream& s, Totals* t) noexcept {
  ++t->streams;
  t->set_down += s.set_downs;
  bool lifted = false;
  for (int i = 0; i < kPaths; ++i) {
    const uint64_t received = s.received[i].load(std::memory_order_relaxed);
    t->sent[i] += s.sent[i].load(std::memory_order_relaxed);
    t->received[i] += received;
    // One whose end came before it had anything to send there was lifted as well.
    if ((s.ever_lifted & (1u << i)) == 0 && (i == 0 || received == 0)) continue;
    ++t->lifted[i];
    lifted = true;
  }
  t->zero_copied += s.zero_copied.load(std::memory_order_relaxed);
  if (lifted) return;
  Reason reason = s.not_lifted.load(std::memory_order_relaxed);
  if (reason == nullptr) {
    reason = s.lift_asked.load(std::memory_order_relaxed) ? kOverTooSoon : "below the threshold";
  }
  bump(t->not_lifted, reason);
}

/// A line that is built without allocation; what does not fit is cut at the end, never in the
/// middle of use.
class Line {
 public:
  void text(const char* format, ...) noexcept __attribute__((format(printf, 2, 3))) {
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(buffer_ + size_, sizeof(buffer_) - size_, format, args);
    va_end(args);
    if (n > 0) size_ += static_cast<size_t>(n);
    if (size_ >= sizeof(buffer_)) size_ = sizeof(buffer_) - 1;
  }
  void json_string(const char* s) noexcept {
    text("\"");
    for (; *s != '\0'; ++s) {
      const unsigned char c = static_cast<unsigned char>(*s);
      if (c == '"' || c == '\\') {
        text("\\%c", c);
      } else if (c < 0x20) {
        text("\\u%04x", c);
      } else {
        text("%c", c);
      }
    }
    text("\"");
  }
  void reasons(const char* name, const ReasonCount* list) noexcept {
    text("\"%s\":{", name);
    for (size_t i = 0; i < kMaxReasons && list[i].reason != nullptr; ++i) {
      if (i != 0) text(",");
      json_string(list[i].reason);
      text(":%llu", static_cast<unsigned long long>(list[i].count));
    }
    text("}");
  }
  const char* data() const noexcept { return buffer_; }
  size_t size() const noexcept { return size_; }

 private:
  char buffer_[16 * 1024];
  size_t size_ = 0;
};

void own_exe(char* out, size_t n) noexcept {
  const auto got = os::readlink("/proc/self/exe", out, n - 1);
  out[got ? *got : 0] = '\0';
}

unsigned long long ull(uint64_t v) noexcept { return v; }

void format(const Totals& t, Line* line) noexcept {
  char exe[1024];
  own_exe(exe, sizeof(exe));
  line->text("{\"pid\":%d,\"exe\":", os::getpid());
  line->json_string(exe);
  line->text(",\"streams\":%llu,\"lifted\":{\"shm\":%llu,\"rdma\":%llu},\"set_down\":%llu,",
             ull(t.streams), ull(t.lifted[1]), ull(t.lifted[2]), ull(t.set_down));
  line->text("\"bytes_sent\":{\"tcp\":%llu,\"shm\":%llu,\"rdma\":%llu},", ull(t.sent[0]),
             ull(t.sent[1]), ull(t.sent[2]));
  line->text("\"bytes_received\":{\"tcp\":%llu,\"shm\":%llu,\"rdma\":%llu},\"zero_copy_bytes\":%llu,",
             ull(t.received[0]), ull(t.received[1]), ull(t.received[2]), ull(t.zero_copied));
  line->reasons("not_lifted", t.not_lifted);
  line->text(",");
  line->reasons("refused", t.refused);
  line->text(",");
  line->reasons("set_down_for", t.set_down_for);
  const auto pairs = transport::verbs::queue_pair_counts();
  line->text(",\"queue_pairs\":{\"made\":%llu,\"reused\":%llu}", ull(pairs.made),
             ull(pairs.reused));
  line->text("}\n");
}

bool g_totals_empty() noexcept {
  MutexLock lock(g_mutex);
  return g_totals.streams == 0 && live_streams() == 0;
}

}  // namespace

void add_to_totals(Stream& s) noexcept {
  MutexLock lock(g_mutex);
  add_stream(s, &g_totals);
}

void count_refusal(Reason reason) noexcept {
  MutexLock lock(g_mutex);
  bump(g_totals.refused, reason);
}

void count_set_down(Reason reason) noexcept {
  MutexLock lock(g_mutex);
  bump(g_totals.set_down_for, reason);
}

void write_summary() noexcept {
  const char* path = config().summary_file;
  if (path == nullptr) return;
  Written before = Written::kNo;
  if (!g_written.compare_exchange_strong(before, Written::kBeing, std::memory_order_acq_rel)) {
    // Another thread is at it, and our caller is about to end the process. Bounded: it may be the
    // very thread that we interrupted.
    for (int i = 0; i < 1000 && g_written.load(std::memory_order_acquire) == Written::kBeing; ++i) {
      timespec nap{0, 1'000'000};
      (void)os::ppoll(nullptr, 0, &nap, nullptr, 0);
    }
    return;
  }
  static Totals all;  // large, and written by one thread once
  {
    MutexLock lock(g_mutex);
    all = g_totals;
  }
  for_each_stream([](Stream& s, void* t) { add_stream(s, static_cast<Totals*>(t)); }, &all);
  static Line line;
  format(all, &line);
  const auto fd = os::open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
  if (!fd) {
    g_written.store(Written::kYes, std::memory_order_release);
    return;
  }
  (void)write_quietly(*fd, line.data(), line.size());  // one write: lines of processes do not mix
  (void)os::close(*fd);
  g_written.store(Written::kYes, std::memory_order_release);
}

void write_summary_for_exec() noexcept {
  if (g_totals_empty())
    return;  // a process that never had a stream leaves its line to the new program
  write_summary();
}

void counters_after_fork_child() noexcept {
  g_mutex.reset_after_fork();
  MutexLock lock(g_mutex);
  g_totals = Totals{};
  g_written.store(Written::kNo, std::memory_order_relaxed);
}

}  // namespace rsock::stream
