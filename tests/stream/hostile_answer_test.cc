// A malicious peer that answers, or that sits on the name, when the stream is the one that calls:
// it is not believed, the refusal is counted, and TCP goes on.

#include "tests/stream/impostor.h"

namespace rsock {
namespace {

using namespace rsock::testing;
using wire::Verdict;

class HostileAnswer : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536", summary_.setting()}); }
  Summary summary_;
};

struct Answer {
  const char* name;
  void (*act)(Impostor&, const wire::Hello&);
  const char* counted;
  bool calls_again;
};
void PrintTo(const Answer& answer, std::ostream* out) { *out << answer.name; }

const Answer kAnswers[] = {
    {"Garbage",
     [](Impostor& peer, const wire::Hello&) {
       std::string noise(wire::kWelcomeSize, '\xff');
       peer.say(noise.data(), noise.size());
     },
     "message magic", false},
    {"TruncatedThenClosed",
     [](Impostor& peer, const wire::Hello&) {
       peer.say("rs", 2);
       peer.hang_up();
     },
     nullptr, true},
    {"Closed", [](Impostor& peer, const wire::Hello&) { peer.hang_up(); }, nullptr, true},
    {"Silence", [](Impostor&, const wire::Hello&) {}, nullptr, true},
    {"AnotherVersion",
     [](Impostor& peer, const wire::Hello& hello) {
       auto w = peer.good_welcome(hello);
       w.version = 7;
       peer.say_welcome(w);
     },
     "version not offered", false},
    {"AnotherNonce",
     [](Impostor& peer, const wire::Hello& hello) {
       auto w = peer.good_welcome(hello);
       w.nonce ^= 1;
       peer.say_welcome(w);
     },
     "answer to another question", false},
    {"AnotherCookie",
     [](Impostor& peer, const wire::Hello& hello) {
       auto w = peer.good_welcome(hello);
       w.socket_cookie ^= 1;
       peer.say_welcome(w);
     },
     "answer by another socket", false},
    {"NotNow",
     [](Impostor& peer, const wire::Hello& hello) {
       auto w = peer.good_welcome(hello);
       w.verdict = Verdict::kNotNow;
       peer.say_welcome(w);
     },
     nullptr, true},
    {"Refused",
     [](Impostor& peer, const wire::Hello& hello) {
       auto w = peer.good_welcome(hello);
       w.verdict = Verdict::kNotAllowed;
       peer.say_welcome(w);
     },
     nullptr, false},
};

class LyingCallee : public HostileAnswer, public ::testing::WithParamInterface<Answer> {};

TEST_P(LyingCallee, IsNotBelievedAndTcpGoesOn) {
  Connection c = connect_to_impostor(StreamIs::kCaller);
  Impostor peer(c.right);
  ASSERT_TRUE(peer.listen());
  wake_interest(c);
  const auto hello = peer.hear_hello();
  ASSERT_TRUE(hello);
  EXPECT_TRUE(hello->tuple == peer.tuple.reverse());
  GetParam().act(peer, *hello);
  EXPECT_TRUE(peer.call < 0 || peer.hung_up());
  EXPECT_FALSE(has_channel(c.left));
  EXPECT_TRUE(echoes(c.left, c.right, 100'000));
  if (GetParam().calls_again) {
    const auto again = peer.hear_hello();
    ASSERT_TRUE(again) << "it should have called again";
    EXPECT_NE(again->nonce, hello->nonce);
    peer.say_welcome(peer.good_welcome(*again));
    EXPECT_TRUE(eventually([&] { return has_channel(c.left); }));
  }
  const std::string line = summary_.line();
  if (GetParam().counted != nullptr) {
    EXPECT_NE(line.find(std::string("\"") + GetParam().counted + "\":1"), std::string::npos)
        << line;
  } else {
    EXPECT_NE(line.find("\"refused\":{}"), std::string::npos) << line;
  }
}

INSTANTIATE_TEST_SUITE_P(Answers, LyingCallee, ::testing::ValuesIn(kAnswers),
                         [](const ::testing::TestParamInfo<Answer>& info) {
                           return info.param.name;
                         });

/// A process of another user that holds the name until told to go.
class Squatter {
 public:
  explicit Squatter(const Impostor& peer) {
    int ready[2];
    EXPECT_EQ(::pipe2(ready, O_CLOEXEC), 0);
    EXPECT_EQ(::pipe2(go_, O_CLOEXEC), 0);
    child_ = ::fork();
    if (child_ == 0) {
      ::close(go_[1]);
      const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
      const bool ok = ::setgid(65534) == 0 && ::setuid(65534) == 0 &&
                      ::bind(fd, peer.name(), peer.name_len()) == 0 && ::listen(fd, 4) == 0;
      char byte = ok ? 'y' : 'n';
      if (::write(ready[1], &byte, 1) == 1) (void)!::read(go_[0], &byte, 1);
      _exit(0);
    }
    char byte = 'n';
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    EXPECT_EQ(byte, 'y');
    ::close(ready[0]);
    ::close(ready[1]);
    ::close(go_[0]);
  }
  ~Squatter() {
    ::close(go_[1]);
    ::waitpid(child_, nullptr, 0);
  }

 private:
  pid_t child_;
  int go_[2];
};

TEST_F(HostileAnswer, ASquatterOfAnotherUserGetsNoHello) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root to become somebody else";
  Connection c = connect_to_impostor(StreamIs::kCaller);
  Impostor peer(c.right);
  {
    Squatter squatter(peer);
    wake_interest(c);
    Stream& s = *FdTable::stream(c.left);
    EXPECT_TRUE(eventually([&] { return s.not_lifted.load() != nullptr; }));
    EXPECT_FALSE(has_channel(c.left));
    EXPECT_STREQ(s.not_lifted.load(), "the peer's rendezvous is held by another user");
    EXPECT_TRUE(echoes(c.left, c.right, 1000));
  }
  const std::string line = summary_.line();
  EXPECT_NE(line.find("\"rendezvous name held by another user\":1"), std::string::npos) << line;
}

TEST_F(HostileAnswer, ASquatterOnTheNameOfACalleeIsCountedAndTcpGoesOn) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root to become somebody else";
  Connection c = connect_to_impostor(StreamIs::kCallee);
  Impostor peer(c.right);
  {
    Squatter squatter(peer);
    wake_interest(c);
    Stream& s = *FdTable::stream(c.left);
    EXPECT_TRUE(eventually([&] { return s.not_lifted.load() != nullptr; }));
    EXPECT_STREQ(s.not_lifted.load(), "the rendezvous name is taken");
    EXPECT_TRUE(echoes(c.left, c.right, 1000));
  }
  const std::string line = summary_.line();
  EXPECT_NE(line.find("\"rendezvous name taken\":"), std::string::npos) << line;
}

}  // namespace
}  // namespace rsock
