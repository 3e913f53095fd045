// A malicious peer that calls: whatever it says, TCP goes on, the refusal is
// counted, nothing leaks, and an honest peer that comes afterwards is still welcome.

#include "tests/stream/impostor.h"

namespace rsock {
namespace {

using namespace rsock::testing;
using wire::Verdict;

class HostileRendezvous : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536", summary_.setting()}); }
  Summary summary_;
};

// --- the stream is the callee
// ------------------------------------------------------------------------

struct Lie {
  const char* name;
  /// Speaks on the open call. Returns the verdict it expects in answer; nothing: the call is
  /// closed.
  std::optional<Verdict> (*act)(Impostor&);
  const char* counted;  // reason in the summary; null: nothing to count
};
void PrintTo(const Lie& lie, std::ostream* out) { *out << lie.name; }

std::optional<Verdict> hello_with_memory(Impostor& peer, Memory memory) {
  peer.take(memory);
  peer.say_hello(peer.good_hello(), {memory.fd});
  return Verdict::kMemory;
}
constexpr int kGoodSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
const size_t kGoodBytes = transport::segment_bytes(kRing);

/// An honest HELLO and its WELCOME: then CONFIRM is due.
void up_to_confirm(Impostor& peer) {
  peer.take(make_memory());
  peer.say_hello(peer.good_hello(), {peer.memory.fd});
  const auto w = peer.hear_welcome();
  ASSERT_TRUE(w && w->verdict == Verdict::kOk);
}

const Lie kLies[] = {
    {"Garbage",
     [](Impostor& peer) -> std::optional<Verdict> {
       std::string noise(wire::kHelloSize, '\xa5');
       peer.say(noise.data(), noise.size());
       return Verdict::kMalformed;
     },
     "message magic"},
    {"Oversized",
     [](Impostor& peer) -> std::optional<Verdict> {
       std::string noise(64 * 1024, 'x');
       peer.say(noise.data(), noise.size());
       return Verdict::kMalformed;
     },
     "message magic"},
    {"TruncatedThenClosed",
     [](Impostor& peer) -> std::optional<Verdict> {
       uint8_t bytes[wire::kHelloSize];
       wire::encode(peer.good_hello(), bytes);
       peer.say(bytes, sizeof(bytes) - 1);
       ::shutdown(peer.call, SHUT_WR);
       return std::nullopt;
     },
     nullptr},
    {"ClosedAtOnce",
     [](Impostor& peer) -> std::optional<Verdict> {
       ::shutdown(peer.call, SHUT_WR);
       return std::nullopt;
     },
     nullptr},
    {"SilentForASecond", [](Impostor&) -> std::optional<Verdict> { return std::nullopt; }, nullptr},
    {"HalfAHelloThenSilence",
     [](Impostor& peer) -> std::optional<Verdict> {
       uint8_t bytes[wire::kHelloSize];
       wire::encode(peer.good_hello(), bytes);
       peer.say(bytes, sizeof(bytes) / 2);
       return std::nullopt;
     },
     nullptr},
    {"VersionOfTheFuture",
     [](Impostor& peer) -> std::optional<Verdict> {
       auto hello = peer.good_hello();
       hello.version_min = hello.version_max = wire::kProtocolVersion + 1;
       peer.take(make_memory());
       peer.say_hello(hello, {peer.memory.fd});
       return Verdict::kVersion;
     },
     "no version in common"},
    {"WelcomeInsteadOfHello",
     [](Impostor& peer) -> std::optional<Verdict> {
       uint8_t bytes[wire::kHelloSize] = {};
       wire::encode(peer.good_welcome(peer.good_hello()), bytes);
       peer.say(bytes, sizeof(bytes));
       return Verdict::kMalformed;
     },
     "message type"},
    {"ClaimToAnotherConnection",
     [](Impostor& peer) -> std::optional<Verdict> {
       auto hello = peer.good_hello();
       ++hello.tuple.local.port;
       peer.take(make_memory());
       peer.say_hello(hello, {peer.memory.fd});
       return Verdict::kNotMine;
     },
     "claim to another connection"},
    {"WrongCookie",
     [](Impostor& peer) -> std::optional<Verdict> {
       auto hello = peer.good_hello();
       ++hello.socket_cookie;
       peer.take(make_memory());
       peer.say_hello(hello, {peer.memory.fd});
       return Verdict::kCredentials;
     },
     "caller does not hold the other end"},
    {"NoMemory",
     [](Impostor& peer) -> std::optional<Verdict> {
       peer.say_hello(peer.good_hello(), {});
       return Verdict::kMemory;
     },
     "no memory passed"},
    {"APipeAsMemory",
     [](Impostor& peer) -> std::optional<Verdict> {
       int fds[2];
       EXPECT_EQ(::pipe2(fds, O_CLOEXEC), 0);
       peer.say_hello(peer.good_hello(), {fds[0]});
       ::close(fds[0]);
       ::close(fds[1]);
       return Verdict::kMemory;
     },
     "not a memfd"},
    {"UnsealedMemory",
     [](Impostor& peer) { return hello_with_memory(peer, make_memory(kGoodBytes, 0)); },
     "memfd not sealed"},
    {"MemoryThatMayShrink",
     [](Impostor& peer) {
       const auto verdict =
           hello_with_memory(peer, make_memory(kGoodBytes, F_SEAL_GROW | F_SEAL_SEAL));
       EXPECT_EQ(::ftruncate(peer.memory.fd, 4096), 0);
       return verdict;
     },
     "memfd not sealed"},
    {"MemoryThatMaySealLater",
     [](Impostor& peer) {
       return hello_with_memory(peer, make_memory(kGoodBytes, F_SEAL_GROW | F_SEAL_SHRINK));
     },
     "memfd not sealed"},
    {"ReadOnlyMemory",
     [](Impostor& peer) {
       return hello_with_memory(peer, make_memory(kGoodBytes, kGoodSeals | F_SEAL_WRITE));
     },
     "memfd sealed against writing"},
    {"MemoryTooSmall",
     [](Impostor& peer) { return hello_with_memory(peer, make_memory(kGoodBytes - 4096)); },
     "memfd of the wrong size"},
    {"EmptyMemory", [](Impostor& peer) { return hello_with_memory(peer, make_memory(0)); },
     "memfd of the wrong size"},
    {"MemoryTooLarge",
     [](Impostor& peer) { return hello_with_memory(peer, make_memory(kGoodBytes + 4096)); },
     "memfd of the wrong size"},
    {"RingLargerThanTheMemory",
     [](Impostor& peer) -> std::optional<Verdict> {
       auto hello = peer.good_hello();
       hello.ring_size = 2 * kRing;
       peer.take(make_memory());
       peer.say_hello(hello, {peer.memory.fd});
       return Verdict::kMemory;
     },
     "memfd of the wrong size"},
    {"RingSizeOutOfRange",
     [](Impostor& peer) -> std::optional<Verdict> {
       auto hello = peer.good_hello();
       hello.ring_size = 0x80000000u;
       peer.say_hello(hello, {});
       return Verdict::kMalformed;
     },
     "ring size out of range"},
    {"AnotherRingSizeInThePage",
     [](Impostor& peer) {
       return hello_with_memory(peer, make_memory(kGoodBytes, kGoodSeals, 2 * kRing));
     },
     "control page ring size"},
    {"ZeroPage",
     [](Impostor& peer) {
       Memory m = make_memory();
       memset(static_cast<void*>(m.page), 0, sizeof(wire::ControlPage));
       return hello_with_memory(peer, m);
     },
     "control page magic"},
    {"NoConfirm",
     [](Impostor& peer) -> std::optional<Verdict> {
       up_to_confirm(peer);
       return std::nullopt;
     },
     nullptr},
    {"ClosedBeforeConfirm",
     [](Impostor& peer) -> std::optional<Verdict> {
       up_to_confirm(peer);
       ::shutdown(peer.call, SHUT_WR);
       return std::nullopt;
     },
     nullptr},
    {"HelloAgainInsteadOfConfirm",
     [](Impostor& peer) -> std::optional<Verdict> {
       up_to_confirm(peer);
       peer.say_hello(peer.good_hello(), {peer.memory.fd});
       return std::nullopt;
     },
     "message type"},
    {"ConfirmOfAnotherNonce",
     [](Impostor& peer) -> std::optional<Verdict> {
       up_to_confirm(peer);
       peer.say_confirm(wire::Confirm{Verdict::kOk, peer.good_hello().nonce ^ 1});
       return std::nullopt;
     },
     nullptr},
    {"ConfirmThatAbandons",
     [](Impostor& peer) -> std::optional<Verdict> {
       up_to_confirm(peer);
       peer.say_confirm(wire::Confirm{Verdict::kNotNow, peer.good_hello().nonce});
       return std::nullopt;
     },
     nullptr},
    {"ManyDescriptors",
     [](Impostor& peer) -> std::optional<Verdict> {
       peer.take(make_memory(kGoodBytes, 0));
       peer.say_hello(peer.good_hello(), std::vector<int>(60, peer.memory.fd));
       return Verdict::kMemory;
     },
     "memfd not sealed"},
};

class LyingCaller : public HostileRendezvous, public ::testing::WithParamInterface<Lie> {};

TEST_P(LyingCaller, IsRefusedAndAnHonestOneIsWelcomeAfterwards) {
  Connection c = connect_to_impostor(StreamIs::kCallee);
  wake_interest(c);
  Impostor peer(c.right);
  ASSERT_TRUE(peer.call_up());
  const int descriptors = open_descriptors();
  const auto verdict = GetParam().act(peer);
  if (verdict) {
    const auto answer = peer.hear_welcome();
    ASSERT_TRUE(answer) << "no answer";
    EXPECT_EQ(answer->verdict, *verdict);
    EXPECT_EQ(answer->socket_cookie, 0u) << "nothing to learn from a refusal";
    EXPECT_EQ(answer->keeper.size, 0u);
  }
  EXPECT_TRUE(peer.hung_up());
  EXPECT_FALSE(has_channel(c.left));
  EXPECT_TRUE(echoes(c.left, c.right, 100'000));
  const int now = open_descriptors();
  EXPECT_LE(now, descriptors + 1) << "the impostor keeps one memfd; the keeper must keep nothing";

  ASSERT_TRUE(peer.agree_as_caller());
  EXPECT_TRUE(eventually([&] { return has_channel(c.left); }));
  peer.hang_up();  // and lets go without a word: TCP again
  EXPECT_TRUE(eventually([&] { return !has_channel(c.left); }));
  EXPECT_TRUE(echoes(c.left, c.right, 100'000));

  const std::string line = summary_.line();
  if (GetParam().counted != nullptr) {
    EXPECT_NE(line.find(std::string("\"") + GetParam().counted + "\":1"), std::string::npos)
        << line;
  } else {
    EXPECT_NE(line.find("\"refused\":{}"), std::string::npos) << line;
  }
}

INSTANTIATE_TEST_SUITE_P(Lies, LyingCaller, ::testing::ValuesIn(kLies),
                         [](const ::testing::TestParamInfo<Lie>& info) { return info.param.name; });

TEST_F(HostileRendezvous, ASecondCallerIsTurnedAwayWhileTheFirstIsServed) {
  Connection c = connect_to_impostor(StreamIs::kCallee);
  wake_interest(c);
  Impostor first(c.right);
  ASSERT_TRUE(first.call_up());
  // The first call has been accepted once a partial hello was read: give the keeper something to
  // wake up for.
  uint8_t bytes[wire::kHelloSize];
  wire::encode(first.good_hello(), bytes);
  first.say(bytes, 10);
  nap_us(20'000);
  Impostor second(c.right);
  ASSERT_TRUE(second.call_up());
  EXPECT_TRUE(second.hung_up());
  first.take(make_memory());
  first.say(bytes + 10, sizeof(bytes) - 10, {first.memory.fd});
  const auto w = first.hear_welcome();
  ASSERT_TRUE(w);
  EXPECT_EQ(w->verdict, Verdict::kOk);
  first.say_confirm(wire::Confirm{Verdict::kOk, first.good_hello().nonce});
  EXPECT_TRUE(eventually([&] { return has_channel(c.left); }));
}

// A descriptor that came with half a message stayed where the next message of another stream found
// it: one peer's memory lay under somebody else's stream.
TEST_F(HostileRendezvous, TheMemoryOfOneCallerIsNeverPutUnderAnotherStream) {
  Connection ours = connect_to_impostor(StreamIs::kCallee);
  Connection theirs = connect_to_impostor(StreamIs::kCallee);
  wake_interest(ours);
  wake_interest(theirs);
  Impostor thief(theirs.right);
  Impostor honest(ours.right);
  ASSERT_TRUE(thief.call_up());
  thief.take(make_memory());
  uint8_t bytes[wire::kHelloSize];
  wire::encode(thief.good_hello(), bytes);
  thief.say(bytes, 10, {thief.memory.fd});
  nap_us(20'000);  // until the keeper has read it
  ASSERT_TRUE(honest.agree_as_caller());
  ASSERT_TRUE(eventually([&] { return has_channel(ours.left); }));
  EXPECT_TRUE(eventually([&] { return honest.memory.page->direction[0].ready.load() != 0; }, 2000));
  EXPECT_EQ(thief.memory.page->direction[0].ready.load(), 0u);
}

TEST_F(HostileRendezvous, AFloodOfCallersThatCloseAtOnceHarmsNobody) {
  Connection c = connect_to_impostor(StreamIs::kCallee);
  wake_interest(c);
  Impostor peer(c.right);
  ASSERT_TRUE(peer.call_up());
  for (int i = 0; i < 2000; ++i) (void)peer.try_call();
  EXPECT_TRUE(echoes(c.left, c.right, 1000));
  EXPECT_TRUE(eventually([&] { return peer.agree_as_caller(); }, 50));
  EXPECT_TRUE(eventually([&] { return has_channel(c.left); }));
}

TEST_F(HostileRendezvous, ACallerOfAnotherUserIsNotEvenHeard) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root to become somebody else";
  Connection c = connect_to_impostor(StreamIs::kCallee);
  wake_interest(c);
  Impostor peer(c.right);
  ASSERT_TRUE(peer.call_up());  // the name is there
  // Until the keeper has heard that we are off again: a caller that comes before is turned away as
  // the second one, and nobody asks who it is.
  ::shutdown(peer.call, SHUT_WR);
  ASSERT_TRUE(peer.hung_up());
  EXPECT_TRUE(Impostor::as_nobody([&] {
    if (!peer.call_up()) return false;
    peer.take(make_memory());
    peer.say_hello(peer.good_hello(), {peer.memory.fd});
    char byte;
    return ::recv(peer.call, &byte, 1, 0) <= 0;  // closed without an answer
  }));
  EXPECT_FALSE(has_channel(c.left));
  EXPECT_TRUE(echoes(c.left, c.right, 1000));
  const std::string line = summary_.line();
  EXPECT_NE(line.find("\"caller is another user\":"), std::string::npos) << line;
}

}  // namespace
}  // namespace rsock
