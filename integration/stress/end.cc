// The calls that move a life's bytes.

#include "end.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>

namespace stress {
namespace {

constexpr size_t kLargestRead = 1 << 20;

Progress& new_progress() {
  constexpr int kMost = 1024;
  static Progress* const table = [] {
    void* memory = mmap(nullptr, kMost * sizeof(Progress), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    return new (memory) Progress[kMost];
  }();
  for (int i = 0; i < kMost; ++i) {
    bool used = false;
    if (!table[i].used.compare_exchange_strong(used, true)) continue;
    table[i].sent = table[i].received = 0;
    table[i].eof = table[i].shut = table[i].broken = false;
    return table[i];
  }
  fail("too many lives at once");
}

std::mutex ends_mutex;
std::vector<std::shared_ptr<End>> ends;

}  // namespace

int known_file() {
  static const int fd = [] {
    const int made = static_cast<int>(CHECKED(memfd_create("known", MFD_CLOEXEC)));
    for (size_t done = 0; done < kTile + kLargest;) {
      done += static_cast<size_t>(
          CHECKED(write(made, known_bytes_at(0) + done, kTile + kLargest - done)));
    }
    return made;
  }();
  return fd;
}

namespace {

uint64_t choice(const Plan& plan, bool client, uint64_t of) {
  Random random(options.seed * 31 + of, static_cast<uint64_t>(plan.slot) * 2 + client,
                static_cast<uint64_t>(plan.life));
  return random.below(100);
}

}  // namespace

End::End(int socket, bool is_client, Plan with)
    : plan(std::move(with)),
      client(is_client),
      fd(socket),
      write_fd(socket),
      quiet(static_cast<int>(choice(plan, client, 1)) < options.mix.quiet),
      nonblocking(choice(plan, client, 2) < 40),
      toggles(!quiet && choice(plan, client, 2) > 80),
      doing(new_doing(client ? "client" : "server")),
      writer_doing(doing),
      at(new_progress()) {
  doing->slot = plan.slot;
  doing->life = plan.life;
  doing->fd = fd;
  if (nonblocking) CHECKED(fcntl(fd, F_SETFL, O_RDWR | O_NONBLOCK));
  if (!quiet && choice(plan, client, 3) < 30) {
    const timeval short_while{0, 1000 + static_cast<int>(choice(plan, client, 4)) * 2000};
    CHECKED(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &short_while, sizeof(short_while)));
    CHECKED(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &short_while, sizeof(short_while)));
  }
  if (choice(plan, client, 5) < 20)
    write_fd = static_cast<int>(CHECKED(fcntl(fd, F_DUPFD_CLOEXEC, 0)));
}

End::~End() {
  give_back(doing);
  at.used = false;
}

uint64_t End::turn_limit(bool of_client, uint64_t received_by_it) const {
  if (plan.shape != Shape::kExchange) return of_client ? plan.client_total : plan.server_total;
  const auto& mine = of_client ? plan.from_client : plan.from_server;
  const auto& theirs = of_client ? plan.from_server : plan.from_client;
  // The client begins; each waits for the other's whole turn.
  const size_t turns = static_cast<size_t>(
      std::upper_bound(theirs.begin(), theirs.end(), received_by_it) - theirs.begin());
  const size_t allowed = std::min(mine.size(), turns + (of_client ? 1 : 0));
  return allowed == 0 ? 0 : mine[allowed - 1];
}

size_t End::turn_of(uint64_t received) const {
  const auto& theirs = client ? plan.from_server : plan.from_client;
  return static_cast<size_t>(std::upper_bound(theirs.begin(), theirs.end(), received) -
                             theirs.begin());
}

/// Both: where one end closes without shutdown, a reader hears of the end only after the other
/// direction's.
void End::moved() {
  const int64_t now = now_ns();
  doing->since.store(now, std::memory_order_relaxed);
  writer_doing->since.store(now, std::memory_order_relaxed);
}

void End::check(const uint8_t* data, size_t size, const char* call) {
  const uint8_t* wanted = known_bytes_at(plan.shift(!client) + at.received);
  if (at.received + size > total_in())
    fail("slot %d life %d: more than was sent", plan.slot, plan.life);
  if (memcmp(data, wanted, size) == 0) return;
  size_t wrong = 0;
  while (data[wrong] == wanted[wrong]) ++wrong;
  const size_t sample = std::min<size_t>(size - wrong, 16);
  const void* found = memmem(known_bytes_at(0), kTile + 16, data + wrong, sample);
  const long distance =
      found == nullptr ? 0 : static_cast<const uint8_t*>(found) - (wanted + wrong);
  fail("slot %d life %d, %s, %s: wrong byte at %llu of %llu: the bytes of %+ld (0: unknown)",
       plan.slot, plan.life, client ? "client" : "server", call,
       static_cast<unsigned long long>(at.received + wrong),
       static_cast<unsigned long long>(total_in()), distance);
}

/// Whoever is rude goes away in the middle: by shutdown, so that a thread in the other direction
/// hears of it.
bool End::ends_rudely() {
  if (plan.rude != (client ? 1 : 2) || at.sent + at.received < plan.rude_at) return false;
  std::lock_guard lock(turn_);
  if (abandoned_) return true;
  abandoned_ = true;
  if (choice(plan, client, 6) < 50) {
    const linger at_once{1, 0};
    CHECKED(setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once)));
  }
  // With one thread at both directions close() alone may be the end.
  if (writer_doing != doing || choice(plan, client, 7) < 50) (void)shutdown(fd, SHUT_RDWR);
  at.broken = true;
  turned_.notify_all();
  return true;
}

Step End::error(int error, const char* what) {
  if (error == EAGAIN) return Step::kBlocked;
  if (error == EINTR) return Step::kMoved;
  if (plan.rude == 0 || (error != ECONNRESET && error != EPIPE && error != ENOTCONN)) {
    fail("slot %d life %d, %s: %s: %s after %llu in, %llu out", plan.slot, plan.life,
         client ? "client" : "server", what, errno_name(error),
         static_cast<unsigned long long>(at.received.load()),
         static_cast<unsigned long long>(at.sent.load()));
  }
  std::lock_guard lock(turn_);
  at.broken = true;
  turned_.notify_all();
  return Step::kOver;
}

/// Both ends do it at a turn that both know, and before a byte can be out of band.
void End::set_out_of_band_inline() {
  if (inline_ || plan.urgent_turn < 0 || static_cast<int>(turn_of(at.received)) < plan.urgent_turn)
    return;
  const int on = 1;
  CHECKED(setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof(on)));
  inline_ = true;
}

Step End::read_some(Random& random, bool wait, bool* drained) {
  static thread_local std::vector<uint8_t> buffer(kLargestRead);
  *drained = false;
  if (!reading() || ends_rudely()) return Step::kOver;
  const uint64_t expected =
      turn_limit(!client, at.sent) - std::min(turn_limit(!client, at.sent), at.received.load());
  size_t size = random.percent(60) ? kLargestRead : random.size(kLargestRead);
  if (random.below(200) == 0) (void)!recv(fd, buffer.data(), 0, MSG_DONTWAIT);
  int flags = wait ? 0 : MSG_DONTWAIT;
  const char* call = "recv";
  // Only what is due comes by itself.
  if (wait && expected > 0 && random.percent(15)) {
    flags |= MSG_WAITALL;
    size = std::min<size_t>(size, expected);
  }
  const size_t part = size / 2;
  iovec parts[3] = {{buffer.data(), part}, {nullptr, 0}, {buffer.data() + part, size - part}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 3;
  ssize_t n = 0;
  {
    const InCall in(doing, wait ? "a blocking receive" : nullptr);
    const bool plain = (wait && flags == 0) || (nonblocking && !wait);
    switch (random.below(7)) {
      case 0:
        if (plain) {
          call = "read";
          n = read(fd, buffer.data(), size);
          break;
        }
        [[fallthrough]];
      case 1:
        call = "recvmsg";
        n = recvmsg(fd, &message, flags);
        break;
      case 2:
        if (plain) {
          call = "readv";
          n = readv(fd, parts, 3);
          break;
        }
        [[fallthrough]];
      case 3:
        call = "peek";
        n = recv(fd, buffer.data(), size, (flags & ~MSG_WAITALL) | MSG_PEEK);
        if (n <= 0) break;
        check(buffer.data(), static_cast<size_t>(n), "peek");
        n = recv(fd, buffer.data(), static_cast<size_t>(n), MSG_DONTWAIT);
        break;
      default:
        n = recv(fd, buffer.data(), size, flags);
        break;
    }
  }
  if (n < 0) return error(errno, call);
  moved();
  if (n == 0) {
    if (at.received != total_in() && plan.rude == 0) {
      fail("slot %d life %d, %s, %s: the end after %llu of %llu", plan.slot, plan.life,
           client ? "client" : "server", call, static_cast<unsigned long long>(at.received.load()),
           static_cast<unsigned long long>(total_in()));
    }
    std::lock_guard lock(turn_);
    at.eof = true;
    if (at.received != total_in()) at.broken = true;
    turned_.notify_all();
    return Step::kOver;
  }
  check(buffer.data(), static_cast<size_t>(n), call);
  // At the urgent mark a receive ends though more is there; so does a peek that was followed by
  // less.
  *drained = static_cast<size_t>(n) < size && plan.urgent_turn < 0 && strcmp(call, "peek") != 0;
  counts.bytes.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
  std::lock_guard lock(turn_);
  at.received += static_cast<uint64_t>(n);
  set_out_of_band_inline();
  turned_.notify_all();
  return Step::kMoved;
}

Step End::write_some(Random& random, bool wait) {
  if (!writing() || ends_rudely()) return Step::kOver;
  const uint64_t limit = may_send();
  if (at.sent == total_out()) {
    if (plan.lazy != (client ? 1 : 2) && shutdown(fd, SHUT_WR) != 0)
      return error(errno, "shutdown");
    at.shut = true;
    return Step::kOver;
  }
  if (at.sent >= limit) return Step::kBlocked;
  const uint64_t left = limit - at.sent;
  const size_t size = static_cast<size_t>(
      std::min<uint64_t>(left, random.percent(50) ? size_t{kLargest} : random.size(1 << 20)));
  const uint64_t from = plan.shift(client) + at.sent;
  const uint8_t* data = known_bytes_at(from);
  const int flags = wait ? MSG_NOSIGNAL : MSG_NOSIGNAL | MSG_DONTWAIT;
  const size_t third = size / 3;
  iovec parts[3] = {{const_cast<uint8_t*>(data), third},
                    {nullptr, 0},
                    {const_cast<uint8_t*>(data) + third, size - third}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 3;
  const char* call = "send";
  ssize_t n = 0;
  if (random.below(200) == 0) (void)!send(write_fd, data, 0, flags | MSG_DONTWAIT);
  {
    const InCall in(writer_doing, wait ? "a blocking send" : nullptr);
    const bool plain = wait || nonblocking;
    switch (random.below(8)) {
      case 0:
        if (plain) {
          call = "write";
          n = write(write_fd, data, size);
          break;
        }
        [[fallthrough]];
      case 1:
        call = "sendmsg";
        n = sendmsg(write_fd, &message, flags);
        break;
      case 2:
        if (plain) {
          call = "writev";
          n = writev(write_fd, parts, 3);
          break;
        }
        [[fallthrough]];
      case 3:
        if (plain) {
          call = "sendfile";
          off_t offset = static_cast<off_t>(from % kTile);
          n = sendfile(write_fd, known_file(), &offset, size);
          break;
        }
        [[fallthrough]];
      case 4:
        // More must follow at once, or the kernel keeps the bytes for 200 ms.
        n = send(write_fd, data, size, size < left ? flags | int{MSG_MORE} : flags);
        break;
      case 5:
        // Two turns later the peer has set SO_OOBINLINE.
        if (inline_ && static_cast<int>(turn_of(at.received)) > plan.urgent_turn + 2) {
          call = "send out of band";
          n = send(write_fd, data, std::min<size_t>(size, 10), flags | MSG_OOB);
          break;
        }
        [[fallthrough]];
      default:
        n = send(write_fd, data, size, flags);
        break;
    }
  }
  if (n < 0) return error(errno, call);
  if (static_cast<size_t>(n) > size) fail("%s: more than was given", call);
  moved();
  std::lock_guard lock(turn_);
  at.sent += static_cast<uint64_t>(n);
  return Step::kMoved;
}

void End::wait_for_turn() {
  std::unique_lock lock(turn_);
  turned_.wait(lock, [&] { return !writing() || wants_out(); });
  moved();
}

void End::close_all() {
  std::unique_lock lock(fds);
  if (write_fd != fd && write_fd >= 0) CHECKED(close(write_fd));
  if (fd >= 0) CHECKED(close(fd));
  fd = write_fd = -1;
}

void publish(const std::shared_ptr<End>& end) {
  std::lock_guard lock(ends_mutex);
  ends.push_back(end);
}

void withdraw(const End* end) {
  std::lock_guard lock(ends_mutex);
  std::erase_if(ends, [&](const auto& e) { return e.get() == end; });
}

std::shared_ptr<End> random_end(Random& random) {
  std::lock_guard lock(ends_mutex);
  return ends.empty() ? nullptr : ends[random.below(ends.size())];
}

void dump_ends() {
  if (!ends_mutex.try_lock()) return say("  the list of lives is locked");
  for (const auto& e : ends) {
    say("  %s slot %d life %d fd %d/%d%s%s: in %llu of %llu%s, out %llu (may %llu) of %llu%s%s%s "
        "rude %d lazy %d",
        e->client ? "client" : "server", e->plan.slot, e->plan.life, e->fd, e->write_fd,
        e->quiet ? " quiet" : "", e->nonblocking ? " nonblocking" : "",
        static_cast<unsigned long long>(e->at.received.load()),
        static_cast<unsigned long long>(e->total_in()), e->at.eof ? " end" : "",
        static_cast<unsigned long long>(e->at.sent.load()),
        static_cast<unsigned long long>(e->may_send()),
        static_cast<unsigned long long>(e->total_out()), e->at.shut ? " shut" : "",
        e->at.broken ? " broken" : "", e->plan.shape == Shape::kExchange ? " turns" : "",
        e->plan.rude, e->plan.lazy);
  }
  say("LIVES DUMPED");
  // These take locks of the library's: a deadlock ends the dump here, and says so by what is
  // missing.
  for (const auto& e : ends) {
    int in = -1, out = -1;
    pollfd p{e->fd, POLLIN | POLLOUT | POLLRDHUP, 0};
    if (e->fd < 0) continue;
    (void)ioctl(e->fd, FIONREAD, &in);
    (void)ioctl(e->fd, SIOCOUTQ, &out);
    (void)poll(&p, 1, 0);
    say("  slot %d life %d fd %d: %d to read, %d on the way, poll says %#x", e->plan.slot,
        e->plan.life, e->fd, in, out, static_cast<unsigned>(p.revents));
  }
  ends_mutex.unlock();
}

}  // namespace stress
