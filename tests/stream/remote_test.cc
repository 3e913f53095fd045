// Streams that look for their peer over RDMA, as far as they come without a device: the test is the
// fabric.

#include <sys/eventfd.h>

#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "core/os/os.h"
#include "core/stream/keeper.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/rdma_host.h"
#include "core/wire/cm_data.h"
#include "tests/stream/impostor.h"
#include "tests/stream/lines.h"

namespace rsock {
namespace {

using namespace rsock::testing;
using transport::verbs::CmEvent;
using Kind = CmEvent::Kind;

/// Connects callers to listeners of this process, by port. What a queue pair would be for ends in
/// kNoRoute.
class Fabric final : public transport::verbs::ConnectionManager {
 public:
  struct Id {
    rdma_cm_id id{};
    uint64_t key = 0;
    wire::Endpoint from{};
    wire::Endpoint to{};
    Id* other = nullptr;  // of a request: the caller's
  };
  /// What a test changes or looks at.
  struct Shared {
    std::mutex mutex;
    std::map<uint16_t, uint64_t> listeners;  // key by port
    std::set<uint16_t> foreign;              // held by another process
    bool unreachable = false;
    bool silent = false;
    int resolved = 0;
    int alive = 0;  // ids
    std::deque<CmEvent> events;
    int fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE);
    std::vector<std::string> rejections;
    int after_fork = 0;
  };

  explicit Fabric(std::shared_ptr<Shared> shared) : s_(std::move(shared)) {}
  int event_fd() const noexcept override { return s_->fd; }
  bool next(CmEvent* event) noexcept override {
    const std::lock_guard lock(s_->mutex);
    uint64_t n;
    (void)!::read(s_->fd, &n, sizeof(n));
    if (s_->events.empty()) return false;
    *event = s_->events.front();
    s_->events.pop_front();
    return true;
  }
  Result<rdma_cm_id*> listen(uint16_t port, uint64_t key) noexcept override {
    const std::lock_guard lock(s_->mutex);
    if (s_->foreign.count(port) != 0 || s_->listeners.count(port) != 0) return fail(EADDRINUSE);
    if (port == 0) port = ++last_port_;
    s_->listeners[port] = key;
    Id* id = make(key);
    id->from.port = port;
    return &id->id;
  }
  uint16_t port_of(rdma_cm_id* listener) noexcept override { return of(listener)->from.port; }
  Result<rdma_cm_id*> resolve(const wire::Endpoint& from, const wire::Endpoint& to,
                              uint64_t key) noexcept override {
    const std::lock_guard lock(s_->mutex);
    ++s_->resolved;
    Id* id = make(key);
    id->from = from;
    id->to = to;
    if (!s_->silent) {
      CmEvent e;
      e.kind = s_->unreachable || to.port > kOwnPorts ? Kind::kNoRoute : Kind::kResolved;
      e.status = -EHOSTUNREACH;
      if (to.port > kOwnPorts && s_->listeners.count(to.port) != 0) e.status = -ENODEV;
      e.key = key;
      push(e);
    }
    return &id->id;
  }
  Result<void> connect(rdma_cm_id* id, std::span<const uint8_t> data) noexcept override {
    const std::lock_guard lock(s_->mutex);
    Id* caller = of(id);
    CmEvent e;
    const auto at = s_->listeners.find(caller->to.port);
    if (at == s_->listeners.end()) {
      e.kind = Kind::kRejected;
      e.key = caller->key;
      e.status = transport::verbs::kRejectedNobodyThere;
    } else {
      Id* request = make(0);
      request->other = caller;
      e.kind = Kind::kRequest;
      e.key = at->second;
      e.id = &request->id;
      e.local = caller->to;
      e.remote = caller->from;
      e.size = data.size();
      std::copy(data.begin(), data.end(), e.data);
    }
    push(e);
    return {};
  }
  void adopt(rdma_cm_id* id, uint64_t key) noexcept override { of(id)->key = key; }
  Result<void> accept(rdma_cm_id*, std::span<const uint8_t>) noexcept override {
    return fail(ENOTSUP);
  }
  void reject(rdma_cm_id* id, std::span<const uint8_t> data) noexcept override {
    const std::lock_guard lock(s_->mutex);
    s_->rejections.emplace_back(data.begin(), data.end());
    if (of(id)->other != nullptr) {
      CmEvent e;
      e.kind = Kind::kRejected;
      e.key = of(id)->other->key;
      e.status = transport::verbs::kRejectedByPeer;
      e.size = data.size();
      std::copy(data.begin(), data.end(), e.data);
      push(e);
    }
    --s_->alive;
  }
  void destroy(rdma_cm_id* id) noexcept override {
    if (id == nullptr) return;
    const std::lock_guard lock(s_->mutex);
    s_->listeners.erase(of(id)->from.port);
    --s_->alive;
  }
  void after_fork_child() noexcept override { ++s_->after_fork; }

  static constexpr uint16_t kOwnPorts = 60'999;  // above: queue pairs, which there are none of

 private:
  static Id* of(rdma_cm_id* id) { return reinterpret_cast<Id*>(id); }
  Id* make(uint64_t key) {
    ids_.push_back(std::make_unique<Id>());  // kept: a late event may name it
    ids_.back()->key = key;
    ++s_->alive;
    return ids_.back().get();
  }
  void push(const CmEvent& e) {
    s_->events.push_back(e);
    const uint64_t one = 1;
    (void)!::write(s_->fd, &one, sizeof(one));
  }
  const std::shared_ptr<Shared> s_;
  std::vector<std::unique_ptr<Id>> ids_;
  uint16_t last_port_ = kOwnPorts;
};

/// A whole life of the host each: the keeper of the former test is left behind, as in a forked
/// child.
class Remote : public ::testing::Test {
 protected:
  void SetUp() override {
    stream::Keeper::stop();
    stream::forget_rdma_in_child();
    configure({"RSOCK_PATH=rdma", summary_.setting()});
    shared_ = std::make_shared<Fabric::Shared>();
    stream::set_fabric(std::make_unique<Fabric>(shared_));
  }
  static std::string reason_of(int fd) {
    const char* reason = FdTable::stream(fd)->not_lifted.load();
    return reason != nullptr ? reason : "";
  }
  template <typename F>
  auto with(F f) {
    const std::lock_guard lock(shared_->mutex);
    return f(*shared_);
  }
  Summary summary_;
  std::shared_ptr<Fabric::Shared> shared_;
};

TEST_F(Remote, BothEndsMeetAndComeAsFarAsTheQueuePair) {
  Connection c = Connection::make();
  ASSERT_TRUE(echoes(c.left, c.right, 10'000));
  // FIND, FOUND, a line to ourselves, WANT, OFFER: then the fabric has no way for queue pairs.
  EXPECT_TRUE(
      eventually([&] { return reason_of(c.left) == "the peer does not answer over RDMA"; }));
  EXPECT_TRUE(echoes(c.left, c.right, 10'000));
  const std::string line = summary_.line();
  EXPECT_NE(line.find("\"refused\":{}"), std::string::npos) << line;
}

TEST_F(Remote, APeerWithoutTheLibraryIsRememberedByAddressAndPort) {
  sockaddr_in address;
  const int listener = listen_somewhere(&address);
  Connection first;
  first.left = connect_stream(address);
  first.right = accept_stream(listener, false);
  char byte;
  ASSERT_EQ(do_send(first.left, "x", 1), 1);
  const std::string nobody = "the peer's library is not there or not listening";
  ASSERT_TRUE(eventually([&] { return reason_of(first.left) == nobody; }));
  const int asked = with([](auto& s) { return s.resolved; });
  EXPECT_GT(asked, 1) << "its process may be a little late";
  Connection second;
  second.left = connect_stream(address);
  second.right = accept_stream(listener, false);
  ASSERT_EQ(do_send(second.left, "x", 1), 1);
  ASSERT_TRUE(eventually([&] { return reason_of(second.left) == nobody; }));
  EXPECT_EQ(with([](auto& s) { return s.resolved; }), asked) << "asked again";
  ASSERT_EQ(do_recv(second.right, &byte, 1), 1);
  close_fd(listener);
  EXPECT_TRUE(eventually([&] { return with([](auto& s) { return s.alive; }) == 0; }));
}

TEST_F(Remote, NoRouteIsSaidAtOnce) {
  shared_->unreachable = true;
  Connection c = Connection::make(true, false);
  ASSERT_EQ(do_send(c.left, "x", 1), 1);
  EXPECT_TRUE(eventually([&] { return reason_of(c.left) == "the peer has no RDMA"; }));
}

TEST_F(Remote, ASilentPeerEndsTheAttemptAfterThreeSeconds) {
  shared_->silent = true;
  Connection c = Connection::make(true, false);
  ASSERT_EQ(do_send(c.left, "x", 1), 1);
  EXPECT_TRUE(
      eventually([&] { return reason_of(c.left) == "the peer does not answer over RDMA"; }));
  EXPECT_TRUE(eventually([&] { return with([](auto& s) { return s.alive; }) == 0; }));
}

TEST_F(Remote, AStrangerAtThePortIsNamed) {
  sockaddr_in address;
  const int listener = listen_somewhere(&address);
  shared_->foreign.insert(ntohs(address.sin_port));
  const char* stranger = "the RDMA port is held by another user's process";
  for (int i = 0; i < 3; ++i) {
    Connection c;
    c.left = connect_stream(address, false);
    c.right = accept_stream(listener);
    ASSERT_EQ(do_send(c.right, "x", 1), 1);
    // Once may be a coincidence: the second look, a second later, decides.
    if (i == 0) nap_us(1'200'000);
    if (i == 2) {
      EXPECT_TRUE(eventually([&] { return reason_of(c.right) == stranger; }));
    }
  }
  close_fd(listener);
  EXPECT_NE(summary_.line().find(stranger), std::string::npos);
}

// --- who asks at our port
// --------------------------------------------------------------------------

struct Asked : Remote {
  void SetUp() override {
    Remote::SetUp();
    listener = listen_somewhere(&address);
    c.left = connect_stream(address, false);
    c.right = accept_stream(listener);
    sockaddr_in caller;
    socklen_t len = sizeof(caller);
    ::getsockname(c.left, reinterpret_cast<sockaddr*>(&caller), &len);
    find.nonce = 99;
    find.tuple = *wire::FourTuple::from(reinterpret_cast<sockaddr*>(&caller), sizeof(caller),
                                        reinterpret_cast<sockaddr*>(&address), sizeof(address));
    ASSERT_EQ(do_send(c.right, "x", 1), 1);
    ASSERT_TRUE(eventually([&] {
      return with([&](auto& s) { return s.listeners.count(find.tuple.remote.port) != 0; });
    }));
    // The stream waits from here on; its listener for queue pairs came first.
  }
  void TearDown() override { close_fd(listener); }
  std::optional<wire::Found> ask(const void* data, size_t n, const wire::FourTuple& real) {
    const size_t before = with([](auto& s) { return s.rejections.size(); });
    with([&](auto& s) {
      CmEvent e;
      e.kind = Kind::kRequest;
      e.key = s.listeners[find.tuple.remote.port];
      static std::deque<Fabric::Id> ids;
      e.id = &ids.emplace_back().id;
      ++s.alive;
      e.local = real.remote;
      e.remote = real.local;
      e.size = n;
      memcpy(e.data, data, n);
      s.events.push_back(e);
      const uint64_t one = 1;
      return ::write(s.fd, &one, sizeof(one));
    });
    EXPECT_TRUE(
        eventually([&] { return with([](auto& s) { return s.rejections.size(); }) > before; }));
    const std::string answer = with([](auto& s) { return s.rejections.back(); });
    const auto found =
        wire::decode_found(reinterpret_cast<const uint8_t*>(answer.data()), answer.size());
    if (!found) return std::nullopt;
    EXPECT_EQ(found->nonce, find.nonce);
    return *found;
  }
  std::optional<wire::Found> ask(const wire::Find& f) {
    uint8_t bytes[wire::kFindSize];
    wire::encode(f, bytes);
    return ask(bytes, sizeof(bytes), find.tuple);
  }
  sockaddr_in address;
  int listener = -1;
  Connection c;
  wire::Find find;
};

TEST_F(Asked, ForAStreamThatWaitsItNamesTheKeeper) {
  const auto found = ask(find);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->verdict, wire::Verdict::kOk);
  EXPECT_NE(found->line_port, 0);
  EXPECT_NE(found->keeper, 0u);
}

TEST_F(Asked, ForAConnectionThatIsNotOfThisHostItSaysSo) {
  wire::Find other = find;
  other.tuple.local.port ^= 1;
  const auto found = ask(other);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->verdict, wire::Verdict::kNotMine);
  EXPECT_EQ(found->line_port, 0);
}

TEST_F(Asked, ForAnotherAddressThanTheOneThatTheQuestionCameTo) {
  wire::Find other = find;
  other.tuple.remote.address[15] ^= 2;
  const auto found = ask(other);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->verdict, wire::Verdict::kNotMine);
}

TEST_F(Asked, ByNoiseItSaysNothing) {
  const std::string noise(56, '\xa5');
  EXPECT_FALSE(ask(noise.data(), noise.size(), find.tuple));
  EXPECT_FALSE(ask("", 0, find.tuple));
}

/// Anybody may open a line; a host speaks for its own addresses.
TEST_F(Asked, WantIsObeyedForTheAddressesOfItsLineOnly) {
  const auto found = ask(find);
  ASSERT_TRUE(found);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(found->line_port);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  set_nonblocking(fd);
  NotingOwner owner;
  Line line(owner, os::OwnedFd(fd), true, {}, 77);
  line.begin();
  const auto ask_for = [&](const wire::FourTuple& tuple, uint64_t nonce) {
    const size_t before = owner.offers.size();
    line.want(wire::Want{nonce, 1 << 16, tuple});
    EXPECT_TRUE(eventually([&] {
      line.on_event(EPOLLIN | EPOLLOUT);
      return owner.offers.size() > before;
    }));
    return owner.offers.back().verdict;
  };
  ASSERT_TRUE(eventually([&] {
    line.on_event(EPOLLIN | EPOLLOUT);
    return line.is_open();
  }));
  EXPECT_EQ(line.keeper(), found->keeper);
  wire::FourTuple other = find.tuple;
  other.local.address[15] ^= 2;
  EXPECT_EQ(ask_for(other, 1), wire::Verdict::kNotMine);
  other = find.tuple;
  other.local.port ^= 1;
  EXPECT_EQ(ask_for(other, 2), wire::Verdict::kNotMine);
  EXPECT_EQ(ask_for(find.tuple, 3), wire::Verdict::kOk);
  EXPECT_NE(owner.offers.back().rdma_port, 0);
  EXPECT_EQ(ask_for(find.tuple, 3), wire::Verdict::kMalformed) << "the nonce is taken";
  EXPECT_EQ(ask_for(find.tuple, 4), wire::Verdict::kNotNow) << "it is being agreed on";
  EXPECT_NE(summary_.line().find("\"claim to another connection\":1"), std::string::npos);
}

/// A process that is not there yet: its stream does not look for its peer.
TEST_F(Asked, ForAStreamThatIsNotReadyItSaysNotNow) {
  Connection other;
  other.left = connect_stream(address, false);
  other.right = accept_stream(listener, false);
  sockaddr_in caller;
  socklen_t len = sizeof(caller);
  ::getsockname(other.left, reinterpret_cast<sockaddr*>(&caller), &len);
  wire::Find f = find;
  f.tuple.local.port = ntohs(caller.sin_port);
  const auto found = ask(f);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->verdict, wire::Verdict::kNotNow);
}

/// Another process of this user that holds the connection: it is asked, and answers.
TEST_F(Asked, ForAStreamOfAnotherProcessItAsksThere) {
  Connection other;
  other.left = connect_stream(address, false);
  other.right = accept_stream(listener, false);
  sockaddr_in caller;
  socklen_t len = sizeof(caller);
  ::getsockname(other.left, reinterpret_cast<sockaddr*>(&caller), &len);
  wire::Find f = find;
  f.tuple.local.port = ntohs(caller.sin_port);
  const auto cookie = os::getsockopt_u64(other.right, 71);  // SO_NETNS_COOKIE
  sockaddr_un name;
  const socklen_t name_len = wire::to_sockaddr(wire::rendezvous_name(f.tuple, *cookie), &name);
  const int owner = ::socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(owner, reinterpret_cast<sockaddr*>(&name), name_len), 0);
  ASSERT_EQ(::listen(owner, 1), 0);
  std::thread answers([&] {
    const int fd = ::accept(owner, nullptr, nullptr);
    uint8_t bytes[wire::kWhereSize];
    ASSERT_EQ(::recv(fd, bytes, sizeof(bytes), MSG_WAITALL), static_cast<ssize_t>(sizeof(bytes)));
    const auto where = wire::decode_where(bytes, sizeof(bytes));
    ASSERT_TRUE(where);
    uint8_t out[wire::kHereSize];
    wire::encode(wire::Here{wire::Verdict::kOk, 4444, where->nonce, 5555}, out);
    ::send(fd, out, sizeof(out), 0);
    ::close(fd);
  });
  const auto found = ask(f);
  answers.join();
  ::close(owner);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->verdict, wire::Verdict::kOk);
  EXPECT_EQ(found->line_port, 4444);
  EXPECT_EQ(found->keeper, 5555u);
}

}  // namespace
}  // namespace rsock
