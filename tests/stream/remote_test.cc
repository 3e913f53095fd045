// Streams that look for their peer over RDMA, as far as they come without a device: the test is the
// fabric.

#include <thread>

#include "core/os/os.h"
#include "core/stream/keeper.h"
#include "core/stream/keeper_loop.h"
#include "core/stream/rdma_host.h"
#include "core/wire/cm_data.h"
#include "tests/stream/fabric.h"
#include "tests/stream/impostor.h"
#include "tests/stream/lines.h"

namespace rsock {
namespace {

using namespace rsock::testing;
using transport::verbs::CmEvent;
using Kind = CmEvent::Kind;

/// A whole life of the host each: the keeper of the former test is left behind, as in a forked
/// child.
class Remote : public ::testing::Test {
 protected:
  void SetUp() override {
    stream::Keeper::stop();
    const MutexLock lock(stream::inside().mutex);  // what the keeper did is seen
    leave_host_behind();
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

TEST_F(Remote, AConnectionThatIsOverSaysNothingOfTheNextOne) {
  sockaddr_in address;
  const int listener = listen_somewhere(&address);
  Connection first;
  first.left = connect_stream(address);
  first.right = accept_stream(listener, false);
  char byte;
  ASSERT_EQ(do_send(first.left, "x", 1), 1);
  ASSERT_EQ(do_recv(first.right, &byte, 1), 1);
  close_fd(std::exchange(first.right, -1));
  ASSERT_TRUE(eventually([&] { return reason_of(first.left) == "the connection is over"; }));
  const int asked = with([](auto& s) { return s.resolved; });
  Connection second;
  second.left = connect_stream(address);
  second.right = accept_stream(listener, false);
  ASSERT_EQ(do_send(second.left, "x", 1), 1);
  EXPECT_TRUE(eventually([&] { return with([](auto& s) { return s.resolved; }) > asked; }));
  close_fd(listener);
}

TEST_F(Remote, AConnectionThatTheProgramHasClosedMeanwhileSaysNothingOfTheNextOne) {
  sockaddr_in address;
  const int listener = listen_somewhere(&address);
  Connection first;
  first.left = connect_stream(address);
  first.right = accept_stream(listener, false);
  with([](auto& s) { return s.silent = true; });
  ASSERT_EQ(do_send(first.left, "x", 1), 1);
  ASSERT_TRUE(eventually([&] { return with([](auto& s) { return s.resolved; }) > 0; }));
  const int number = std::exchange(first.left, -1);
  close_fd(number);
  Connection second;
  second.left = connect_stream(address);
  second.right = accept_stream(listener, false);
  ASSERT_EQ(second.left, number) << "what is asked of that number is said of another connection";
  CmEvent late;
  late.kind = Kind::kUnreachable;
  with([&](auto& s) {
    late.key = s.resolved_key;
    s.push(late);
    s.silent = false;
  });
  ASSERT_TRUE(eventually([&] { return with([](auto& s) { return s.alive; }) == 0; }));
  const int asked = with([](auto& s) { return s.resolved; });
  ASSERT_EQ(do_send(second.left, "x", 1), 1);
  EXPECT_TRUE(eventually([&] { return with([](auto& s) { return s.resolved; }) > asked; }));
  close_fd(listener);
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
  // The keeper turns it, and may hold an event of it when the test is over.
  static NotingOwner owner;
  static std::unique_ptr<Line> line;
  const auto locked = [](auto f) {
    const MutexLock lock(stream::inside().mutex);
    return f();
  };
  locked([&] {
    line = std::make_unique<Line>(owner, os::OwnedFd(fd), true, std::span<const uint8_t>{}, 77);
    line->begin();
  });
  const auto ask_for = [&](const wire::FourTuple& tuple, uint64_t nonce) {
    const size_t before = locked([&] {
      line->want(wire::Want{nonce, 1 << 16, tuple});
      return owner.offers.size();
    });
    const auto answered = [&] { return owner.offers.size() > before; };
    EXPECT_TRUE(eventually([&] { return locked(answered); }));
    return locked([&] { return owner.offers.back().verdict; });
  };
  ASSERT_TRUE(eventually([&] { return locked([&] { return line->is_open(); }); }));
  EXPECT_EQ(locked([&] { return line->keeper(); }), found->keeper);
  wire::FourTuple other = find.tuple;
  other.local.address[15] ^= 2;
  EXPECT_EQ(ask_for(other, 1), wire::Verdict::kNotMine);
  other = find.tuple;
  other.local.port ^= 1;
  EXPECT_EQ(ask_for(other, 2), wire::Verdict::kNotMine);
  EXPECT_EQ(ask_for(find.tuple, 3), wire::Verdict::kOk);
  EXPECT_NE(locked([&] { return owner.offers.back().rdma_port; }), 0);
  EXPECT_EQ(ask_for(find.tuple, 3), wire::Verdict::kMalformed) << "the nonce is taken";
  EXPECT_EQ(ask_for(find.tuple, 4), wire::Verdict::kNotNow) << "it is being agreed on";
  locked([&] { line->end("the test is over"); });
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
