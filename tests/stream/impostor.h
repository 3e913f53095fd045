// A peer that plays the rendezvous by hand: as it should be, or with any lie in it.
//
// Purpose: one end of a connection is a stream of the library, the other a plain socket, and this
// code speaks for the plain end: it knows the name, the messages and the memory, and sends whatever
// a test wants. The addresses decide who calls: 127.0.0.1 calls 127.0.0.2, which calls 127.0.0.3.
// Ownership: an Impostor closes its descriptors and unmaps its memory. Thread safety: none.
#pragma once

#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <optional>

#include "core/stream/counters.h"
#include "core/transport/shm/shm_segment.h"
#include "core/wire/control_page.h"
#include "core/wire/rendezvous.h"
#include "tests/stream/loopback.h"

#ifndef SO_NETNS_COOKIE
#define SO_NETNS_COOKIE 71
#endif

namespace rsock::testing {

inline constexpr size_t kRing = 64 * 1024;

inline sockaddr_in loopback_address(int last) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + static_cast<uint32_t>(last));
  return a;
}

/// left: a stream. right: plain, at 127.0.0.2. The stream listens for its caller, or calls.
enum class StreamIs { kCallee, kCaller };

inline Connection connect_to_impostor(StreamIs role) {
  sockaddr_in there = loopback_address(2);
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&there), sizeof(there)), 0);
  EXPECT_EQ(::listen(listener, 1), 0);
  socklen_t len = sizeof(there);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&there), &len);
  Connection c;
  c.left = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  stream::on_socket(c.left, AF_INET, SOCK_STREAM, 0);
  const sockaddr_in here = loopback_address(role == StreamIs::kCaller ? 1 : 3);
  EXPECT_EQ(::bind(c.left, reinterpret_cast<const sockaddr*>(&here), sizeof(here)), 0);
  const long r = ::connect(c.left, reinterpret_cast<sockaddr*>(&there), sizeof(there));
  EXPECT_EQ(r, 0);
  stream::on_connect(c.left, r);
  c.right = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  EXPECT_GE(c.right, 0);
  ::close(listener);
  return c;
}

/// A byte there: now the stream is worth lifting, and its keeper looks for us.
inline void wake_interest(const Connection& c) {
  char byte;
  ASSERT_EQ(do_send(c.left, "w", 1), 1);
  ASSERT_EQ(do_recv(c.right, &byte, 1), 1);
}

inline uint64_t socket_u64(int fd, int option) {
  uint64_t v = 0;
  socklen_t len = sizeof(v);
  return ::getsockopt(fd, SOL_SOCKET, option, &v, &len) == 0 ? v : 0;
}

struct Memory {
  int fd = -1;
  wire::ControlPage* page = nullptr;
  size_t bytes = 0;
};

/// A memfd as create_segment() makes it, unless told otherwise.
inline Memory make_memory(size_t bytes = transport::segment_bytes(kRing),
                          int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL,
                          uint32_t ring = kRing) {
  Memory m;
  m.fd = ::memfd_create("impostor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  m.bytes = bytes;
  EXPECT_EQ(::ftruncate(m.fd, static_cast<off_t>(bytes)), 0);
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m.fd, 0);
  if (base != MAP_FAILED && bytes >= wire::kControlPageSize) {
    m.page = static_cast<wire::ControlPage*>(base);
    m.page->magic = wire::kControlMagic;
    m.page->version = 1;
    m.page->ring_size = ring;
  }
  if (seals != 0 && (seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) == 0) {
    EXPECT_EQ(::fcntl(m.fd, F_ADD_SEALS, seals), 0);
  } else if (seals != 0) {
    if (m.page != nullptr) ::munmap(m.page, bytes);
    m.page = nullptr;
    EXPECT_EQ(::fcntl(m.fd, F_ADD_SEALS, seals), 0);
  }
  return m;
}

class Impostor {
 public:
  explicit Impostor(int tcp) : tcp_(tcp) {
    sockaddr_storage local, remote;
    socklen_t local_len = sizeof(local), remote_len = sizeof(remote);
    ::getsockname(tcp, reinterpret_cast<sockaddr*>(&local), &local_len);
    ::getpeername(tcp, reinterpret_cast<sockaddr*>(&remote), &remote_len);
    tuple = *wire::FourTuple::from(reinterpret_cast<sockaddr*>(&local), local_len,
                                   reinterpret_cast<sockaddr*>(&remote), remote_len);
    cookie = socket_u64(tcp, SO_COOKIE);
    name_len_ =
        wire::to_sockaddr(wire::rendezvous_name(tuple, socket_u64(tcp, SO_NETNS_COOKIE)), &name_);
  }
  ~Impostor() {
    for (int fd : {call, listener, memory.fd}) {
      if (fd >= 0) ::close(fd);
    }
    if (memory.page != nullptr) ::munmap(memory.page, memory.bytes);
  }
  Impostor(const Impostor&) = delete;

  // --- caller ---
  /// One try. False: nobody listens.
  bool try_call() {
    hang_up();
    call = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(call, reinterpret_cast<sockaddr*>(&name_), name_len_) == 0) return true;
    hang_up();
    return false;
  }
  bool call_up() {
    return eventually([this] { return try_call(); });
  }
  wire::Hello good_hello() const {
    wire::Hello hello;
    hello.nonce = 0x1122334455667788;
    hello.socket_cookie = cookie;
    hello.ring_size = kRing;
    hello.tuple = tuple;
    hello.keeper = wire::keeper_name(1, 2);
    return hello;
  }
  void say(const void* bytes, size_t n, std::vector<int> fds = {}) {
    iovec iov{const_cast<void*>(bytes), n};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 64)] = {};
    msghdr msg{};
    msg.msg_iov = &iov;
    msg.msg_iovlen = 1;
    if (!fds.empty()) {
      msg.msg_control = control;
      msg.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
      cmsghdr* c = CMSG_FIRSTHDR(&msg);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
      memcpy(CMSG_DATA(c), fds.data(), sizeof(int) * fds.size());
    }
    (void)::sendmsg(call, &msg, MSG_NOSIGNAL);
  }
  void say_hello(const wire::Hello& hello, std::vector<int> fds) {
    uint8_t bytes[wire::kHelloSize];
    wire::encode(hello, bytes);
    say(bytes, sizeof(bytes), std::move(fds));
  }
  void say_confirm(const wire::Confirm& confirm) {
    uint8_t bytes[wire::kConfirmSize];
    wire::encode(confirm, bytes);
    say(bytes, sizeof(bytes));
  }
  /// The other side's answer, or nothing if it hung up (or says nothing for ten seconds).
  std::optional<wire::Welcome> hear_welcome() {
    uint8_t bytes[wire::kWelcomeSize];
    if (!hear(bytes, sizeof(bytes), nullptr)) return std::nullopt;
    const auto w = wire::decode_welcome(bytes, sizeof(bytes));
    EXPECT_TRUE(w.has_value());
    return w ? std::optional(*w) : std::nullopt;
  }
  /// The whole of it, without a lie.
  bool agree_as_caller() {
    if (!call_up()) return false;
    take(make_memory());
    say_hello(good_hello(), {memory.fd});
    const auto w = hear_welcome();
    if (!w || w->verdict != wire::Verdict::kOk) return false;
    EXPECT_EQ(w->nonce, good_hello().nonce);
    peer_keeper = w->keeper;
    say_confirm(wire::Confirm{wire::Verdict::kOk, good_hello().nonce});
    return true;
  }
  void take(Memory m) {
    if (memory.fd >= 0) ::close(memory.fd);
    if (memory.page != nullptr) ::munmap(memory.page, memory.bytes);
    memory = m;
  }

  // --- callee ---
  bool listen() {
    listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return ::bind(listener, reinterpret_cast<sockaddr*>(&name_), name_len_) == 0 &&
           ::listen(listener, 4) == 0;
  }
  /// Waits for a call and its HELLO; its memory is mapped.
  std::optional<wire::Hello> hear_hello() {
    pollfd p{listener, POLLIN, 0};
    if (::poll(&p, 1, 10'000) != 1) return std::nullopt;
    hang_up();
    call = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    uint8_t bytes[wire::kHelloSize];
    Memory m;
    if (!hear(bytes, sizeof(bytes), &m.fd)) return std::nullopt;
    struct stat st;
    if (m.fd >= 0 && ::fstat(m.fd, &st) == 0) {
      m.bytes = static_cast<size_t>(st.st_size);
      m.page = static_cast<wire::ControlPage*>(
          ::mmap(nullptr, m.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m.fd, 0));
    }
    take(m);
    const auto hello = wire::decode_hello(bytes, sizeof(bytes));
    EXPECT_TRUE(hello.has_value());
    if (!hello) return std::nullopt;
    peer_keeper = hello->keeper;
    return *hello;
  }
  wire::Welcome good_welcome(const wire::Hello& hello) const {
    wire::Welcome w;
    w.nonce = hello.nonce;
    w.socket_cookie = cookie;
    w.keeper = wire::keeper_name(1, 2);
    return w;
  }
  void say_welcome(const wire::Welcome& welcome) {
    uint8_t bytes[wire::kWelcomeSize];
    wire::encode(welcome, bytes);
    say(bytes, sizeof(bytes));
  }

  /// True: the other side closed the call (what it said before is thrown away).
  bool hung_up() {
    char bytes[256];
    for (;;) {
      pollfd p{call, POLLIN, 0};
      if (::poll(&p, 1, 10'000) != 1) return false;
      if (::recv(call, bytes, sizeof(bytes), 0) <= 0) return true;
    }
  }
  void hang_up() {
    if (call >= 0) ::close(call);
    call = -1;
  }
  /// "Look at the control words": to the stream's keeper.
  void kick(uint64_t nonce) {
    uint8_t bytes[wire::kKickSize];
    wire::encode(wire::Kick{nonce}, bytes);
    sockaddr_un to;
    const socklen_t len = wire::to_sockaddr(peer_keeper, &to);
    const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    (void)::sendto(fd, bytes, sizeof(bytes), 0, reinterpret_cast<sockaddr*>(&to), len);
    ::close(fd);
  }
  /// Runs `act` in a process of another user. Returns its answer.
  template <typename F>
  static bool as_nobody(F&& act) {
    const pid_t child = ::fork();
    if (child == 0) _exit(::setgid(65534) == 0 && ::setuid(65534) == 0 && act() ? 0 : 1);
    int status = -1;
    return ::waitpid(child, &status, 0) == child && status == 0;
  }
  const sockaddr* name() const { return reinterpret_cast<const sockaddr*>(&name_); }
  socklen_t name_len() const { return name_len_; }

  wire::FourTuple tuple;  // as this end sees it
  uint64_t cookie = 0;
  int call = -1;
  int listener = -1;
  Memory memory;
  wire::SocketName peer_keeper;

 private:
  bool hear(uint8_t* bytes, size_t n, int* fd) {
    for (size_t got = 0; got < n;) {
      pollfd p{call, POLLIN, 0};
      if (::poll(&p, 1, 10'000) != 1) return false;
      iovec iov{bytes + got, n - got};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
      msghdr msg{};
      msg.msg_iov = &iov;
      msg.msg_iovlen = 1;
      msg.msg_control = control;
      msg.msg_controllen = sizeof(control);
      const ssize_t r = ::recvmsg(call, &msg, MSG_CMSG_CLOEXEC);
      if (r <= 0) return false;
      if (cmsghdr* c = CMSG_FIRSTHDR(&msg); c != nullptr && fd != nullptr)
        memcpy(fd, CMSG_DATA(c), sizeof(int));
      got += static_cast<size_t>(r);
    }
    return true;
  }

  const int tcp_;
  sockaddr_un name_;
  socklen_t name_len_ = 0;
};

/// The summary line of this process so far; the counters begin anew.
class Summary {
 public:
  Summary() {
    char path[] = "/tmp/rsock-summary-XXXXXX";
    const int fd = ::mkstemp(path);
    ::close(fd);
    path_ = path;
    // What a forked child does: counts for itself, and may write its line once.
    stream::counters_after_fork_child();
  }
  ~Summary() { ::unlink(path_.c_str()); }
  std::string setting() const { return "RSOCK_SUMMARY=" + path_; }
  /// Once.
  std::string line() const {
    stream::write_summary();
    std::ifstream in(path_);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  }

 private:
  std::string path_;
};

inline int open_descriptors() {
  int n = 0;
  for (int fd = 0; fd < 70'000; ++fd) n += ::fcntl(fd, F_GETFD) != -1;
  return n;
}

}  // namespace rsock::testing
