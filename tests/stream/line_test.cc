// The line between two keepers: both prove themselves, words keep their order, whatever else comes
// ends it.

#include <sys/resource.h>

#include "core/base/clock.h"
#include "core/os/os.h"
#include "core/stream/line_table.h"
#include "core/wire/mac.h"
#include "tests/stream/impostor.h"
#include "tests/stream/lines.h"

namespace rsock {
namespace {

using namespace rsock::testing;
using State = Line::State;

const std::string kKey = "sixteen bytes and";

class LineOfKeepers : public ::testing::Test {
 protected:
  void SetUp() override { configure({summary_.setting()}); }
  std::string refused() { return summary_.line(); }
  Summary summary_;
};

struct Two {
  Two(std::string left_key, std::string right_key) : lkey(left_key), rkey(right_key) {
    left = std::make_shared<Line>(one, os::OwnedFd(sockets.left), true, bytes_of(lkey), 11);
    right = std::make_shared<Line>(two, os::OwnedFd(sockets.right), false, bytes_of(rkey), 22);
    left->begin();
    right->begin();
    turn();
  }
  void turn() {
    for (int i = 0; i < 20; ++i) {
      left->on_event(EPOLLIN | EPOLLOUT);
      right->on_event(EPOLLIN | EPOLLOUT);
    }
  }
  std::string lkey;
  std::string rkey;
  NotingOwner one;
  NotingOwner two;
  Sockets sockets;
  std::shared_ptr<Line> left;
  std::shared_ptr<Line> right;
};

TEST_F(LineOfKeepers, OpensWithoutAKeyAndWithTheSame) {
  for (const std::string& key : {std::string(), kKey}) {
    Two t(key, key);
    EXPECT_EQ(t.left->state(), State::kOpen);
    EXPECT_EQ(t.right->state(), State::kOpen);
    EXPECT_EQ(t.one.opened + t.two.opened, 2);
    EXPECT_EQ(t.left->keeper(), 22u);
    EXPECT_EQ(t.right->keeper(), 11u);
    EXPECT_EQ(t.left->local(), t.right->remote());
    EXPECT_EQ(t.left->remote(), t.right->local());
    EXPECT_EQ(t.left->deadline(), UINT64_MAX);
  }
}

TEST_F(LineOfKeepers, OfDifferentKeysDoesNotOpen) {
  for (auto [a, b] : {std::pair{kKey, kKey + "x"}, {kKey, std::string()}, {std::string(), kKey}}) {
    Two t(a, b);
    EXPECT_TRUE(t.left->is_down());
    EXPECT_TRUE(t.right->is_down());
    EXPECT_EQ(t.one.opened + t.two.opened, 0);
    EXPECT_EQ(t.one.downs, 1);
    EXPECT_EQ(t.two.downs, 1);
  }
  EXPECT_NE(refused().find("wrong or missing shared key"), std::string::npos);
}

TEST_F(LineOfKeepers, CarriesQuestionsAndWordsInOrder) {
  Two t("", "");
  wire::Want want;
  want.nonce = 5;
  want.ring_size = 1 << 16;
  want.tuple.local = t.left->local();
  want.tuple.remote = t.left->remote();
  t.left->want(want);
  t.right->offer(wire::Offer{5, wire::Verdict::kOk, 4791});
  for (uint64_t i = 0; i < 3000; ++i) {
    t.left->say(5, wire::Word::kStart, i);
    t.right->say(6, wire::Word::kFrozen, i);
    if (i % 100 == 0) t.turn();
  }
  t.turn();
  ASSERT_EQ(t.two.wants.size(), 1u);
  EXPECT_EQ(t.two.wants[0].tuple, want.tuple);
  ASSERT_EQ(t.one.offers.size(), 1u);
  EXPECT_EQ(t.one.offers[0].rdma_port, 4791);
  ASSERT_EQ(t.two.words.size(), 3000u);
  ASSERT_EQ(t.one.words.size(), 3000u);
  for (uint64_t i = 0; i < 3000; ++i) {
    EXPECT_EQ(t.two.words[i].value, i);
    EXPECT_EQ(t.one.words[i].value, i);
  }
}

TEST_F(LineOfKeepers, QueuesWhatDoesNotFitAndThenSendsIt) {
  Two t("", "");
  const int small = 4096;
  ::setsockopt(t.sockets.left, SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
  // More than the peer's window and our buffer may hold at the moment, less than the queue.
  for (uint64_t i = 0; i < 1500; ++i) t.left->say(5, wire::Word::kStart, i);
  EXPECT_TRUE(eventually([&] {
    t.turn();
    return t.two.words.size() == 1500;
  }));
  for (uint64_t i = 0; i < t.two.words.size(); ++i) EXPECT_EQ(t.two.words[i].value, i);
}

TEST_F(LineOfKeepers, OfAPeerThatDoesNotReadEndsInsteadOfWaiting) {
  Two t("", "");
  for (int i = 0; i < 3'000'000 && !t.left->is_down(); ++i) {
    t.left->say(5, wire::Word::kStart, 1);
    if (i % 1000 == 0) t.left->on_event(EPOLLIN);
  }
  t.left->on_event(EPOLLIN);
  EXPECT_TRUE(t.left->is_down());
  t.left->say(5, wire::Word::kStart, 1);  // is nothing
}

TEST_F(LineOfKeepers, GoesDownWithItsPeer) {
  Two t("", "");
  t.right->end("test");
  EXPECT_EQ(t.two.downs, 1);
  t.left->on_event(EPOLLIN);
  EXPECT_TRUE(t.left->is_down());
  EXPECT_EQ(t.one.downs, 1);
  t.left->on_event(EPOLLIN);
  t.left->end("again");
  EXPECT_EQ(t.one.downs, 1);
}

TEST_F(LineOfKeepers, TakesBytesOneByOne) {
  LineAndSocket t;
  const wire::Greeting theirs = t.hear_greeting();
  std::string all(wire::kGreetingSize + wire::kProofSize + wire::kWordSize, '\0');
  auto* at = reinterpret_cast<uint8_t*>(all.data());
  wire::Greeting mine;
  mine.keeper = 33;
  mine.challenge = theirs.challenge + 1;
  wire::encode(mine, at);
  wire::encode(wire::Proof{}, at + wire::kGreetingSize);
  wire::encode(wire::WordMessage{7, wire::Word::kReady, 0},
               at + wire::kGreetingSize + wire::kProofSize);
  for (const char& c : all) t.say(&c, 1);
  EXPECT_TRUE(t.line->is_open());
  ASSERT_EQ(t.owner.words.size(), 1u);
  EXPECT_EQ(t.owner.words[0].nonce, 7u);
}

// --- hostile peers
// ---------------------------------------------------------------------------------

TEST_F(LineOfKeepers, RefusesNoise) {
  LineAndSocket t;
  t.say(std::string(10'000, '\xa5').data(), 10'000);
  EXPECT_TRUE(t.line->is_down());
  EXPECT_NE(refused().find("magic"), std::string::npos);
}

TEST_F(LineOfKeepers, HearsNoWordBeforeTheProof) {
  for (const bool greeted : {false, true}) {
    LineAndSocket t;
    wire::Greeting mine;
    mine.challenge = t.hear_greeting().challenge + 1;
    if (greeted) t.greet(mine);
    t.say_word({1, wire::Word::kBye, 0});
    EXPECT_TRUE(t.line->is_down());
    EXPECT_TRUE(t.owner.words.empty());
  }
  EXPECT_NE(refused().find("line message out of turn"), std::string::npos);
}

TEST_F(LineOfKeepers, GreetsOnce) {
  LineAndSocket t;
  wire::Greeting mine;
  mine.challenge = t.hear_greeting().challenge + 1;
  t.greet(mine);
  t.prove({});
  ASSERT_TRUE(t.line->is_open());
  t.greet(mine);
  EXPECT_TRUE(t.line->is_down());
}

TEST_F(LineOfKeepers, IsNotOpenedByAMirror) {
  for (const bool opener : {false, true}) {
    LineAndSocket t(kKey, opener);
    for (int i = 0; i < 4; ++i) {
      const std::string said = t.hear(4096);
      if (said.empty() || t.line->is_down()) break;
      t.say(said.data(), said.size());
    }
    EXPECT_TRUE(t.line->is_down());
    EXPECT_EQ(t.owner.opened, 0);
  }
}

/// Between two honest lines: a proof that was heard on one connection is worth nothing on the next.
TEST_F(LineOfKeepers, IsNotOpenedByAReplay) {
  std::string greeting;
  std::string proof;
  {
    LineAndSocket victim(kKey);
    LineAndSocket friendly(kKey, true);  // what it says goes to the victim, and is written down
    greeting = friendly.hear(wire::kGreetingSize);
    victim.say(greeting.data(), greeting.size());
    const std::string answer = victim.hear(wire::kGreetingSize);
    friendly.say(answer.data(), answer.size());
    proof = friendly.hear(wire::kProofSize);
    victim.say(proof.data(), proof.size());
    ASSERT_TRUE(victim.line->is_open());
  }
  LineAndSocket victim(kKey);
  victim.say(greeting.data(), greeting.size());
  ASSERT_EQ(victim.line->state(), State::kProving);
  victim.say(proof.data(), proof.size());
  EXPECT_TRUE(victim.line->is_down());
  EXPECT_EQ(victim.owner.opened, 0);
}

TEST_F(LineOfKeepers, IsNotOpenedByAProofOfTheWrongRole) {
  LineAndSocket t(kKey);  // accepted: the proof must be an opener's
  const wire::Greeting theirs = t.hear_greeting();
  wire::Greeting mine;
  mine.keyed = true;
  mine.challenge = theirs.challenge + 1;
  t.greet(mine);
  t.prove(wire::prove(bytes_of(kKey), false, mine, theirs));
  EXPECT_TRUE(t.line->is_down());
}

TEST_F(LineOfKeepers, OfAnotherVersionIsNone) {
  LineAndSocket t;
  wire::Greeting mine;
  mine.version_min = mine.version_max = wire::kProtocolVersion + 1;
  mine.challenge = t.hear_greeting().challenge + 1;
  t.greet(mine);
  EXPECT_TRUE(t.line->is_down());
}

/// No memory for one packet: the word is lost, and the words behind it would be believed.
TEST_F(LineOfKeepers, IsDownForBothWhenAWordCouldNotBeSent) {
  Two t("", "");
  ASSERT_TRUE(t.left->is_open());
  {
    const auto real = os::door();
    os::set_door([](long n, long a, long b, long c, long d, long e, long f) noexcept -> long {
      return n == SYS_sendto ? -ENOBUFS : raw_syscall(n, a, b, c, d, e, f);
    });
    t.left->say(1, wire::Word::kReady, 0);
    os::set_door(real);
  }
  t.left->say(1, wire::Word::kStart, 5);
  t.turn();
  EXPECT_TRUE(t.two.words.empty()) << "START without READY";
  EXPECT_TRUE(t.left->is_down());
  EXPECT_TRUE(t.right->is_down());
  EXPECT_EQ(t.one.downs + t.two.downs, 2);
}

// --- the table
// -------------------------------------------------------------------------------------

struct Table {
  Table() : table(owner, {}, 11) { EXPECT_TRUE(table.listen()); }
  ~Table() {
    for (int fd : visitors) ::close(fd);
  }
  void visit() {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    to.sin_port = htons(table.port());
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    visitors.push_back(fd);
    table.on_event(EPOLLIN);
  }
  /// As any stranger can where there is no key.
  void prove_last() {
    uint8_t bytes[wire::kGreetingSize + wire::kProofSize];
    wire::Greeting mine;
    mine.challenge = 4711 + visitors.size();
    wire::encode(mine, *reinterpret_cast<uint8_t(*)[wire::kGreetingSize]>(bytes));
    wire::encode(wire::Proof{},
                 *reinterpret_cast<uint8_t(*)[wire::kProofSize]>(bytes + wire::kGreetingSize));
    EXPECT_EQ(::send(visitors.back(), bytes, sizeof(bytes), MSG_NOSIGNAL),
              static_cast<ssize_t>(sizeof(bytes)));
    const std::shared_ptr<Line> line = table.all().back();
    EXPECT_TRUE(eventually([&] {
      line->on_event(EPOLLIN);
      return line->is_open() || line->is_down();
    }));
  }
  NotingOwner owner;
  stream::LineTable table;
  std::vector<int> visitors;
};

TEST_F(LineOfKeepers, TableBoundsThoseThatHaveNotProvedThemselves) {
  Table t;
  for (size_t i = 0; i < stream::LineTable::kMostUnproved + 6; ++i) t.visit();
  EXPECT_EQ(t.table.all().size(), stream::LineTable::kMostUnproved);
  EXPECT_NE(refused().find("\"too many unproved lines\":6"), std::string::npos);
}

/// Without a key anybody opens lines, and each is a descriptor of the program's process.
TEST_F(LineOfKeepers, TableBoundsThoseThatAreOpen) {
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit few = before;
  few.rlim_cur = 512;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  Table t;
  std::shared_ptr<Line> used;  // as a channel has it
  for (size_t i = 0; i < 200; ++i) {
    t.visit();
    t.prove_last();
    if (i == 0) used = t.table.all().front();
    (void)t.table.run_timers(monotonic_ns());
    EXPECT_LE(t.table.all().size(), 512u / 16);
    if (i >= 150) {  // those that were turned out are gone
      ::close(t.visitors.front());
      t.visitors.erase(t.visitors.begin());
    }
  }
  EXPECT_TRUE(used->is_open());
  EXPECT_TRUE(t.table.all().back()->is_open()) << "who comes last finds room";
  EXPECT_NE(refused().find("\"too many lines from other hosts\":168"), std::string::npos)
      << refused();
  ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST_F(LineOfKeepers, TableEndsAnOpenLineThatNoChannelUses) {
  Table t;
  t.visit();
  t.prove_last();
  std::shared_ptr<Line> used = t.table.all().front();
  const uint64_t later = monotonic_ns() + 2 * stream::LineTable::kIdleNs;
  (void)t.table.run_timers(later);
  ASSERT_TRUE(used->is_open());
  used.reset();
  EXPECT_EQ(t.table.run_timers(later + 1), later + stream::LineTable::kIdleNs);
  EXPECT_EQ(t.table.all().size(), 1u);
  (void)t.table.run_timers(later + stream::LineTable::kIdleNs);
  EXPECT_TRUE(t.table.all().empty());
}

TEST_F(LineOfKeepers, TableEndsTheSilentAfterThreeSeconds) {
  Table t;
  t.visit();
  const uint64_t now = monotonic_ns();
  EXPECT_LE(t.table.run_timers(now), now + Line::kGreetNs);
  EXPECT_EQ(t.table.all().size(), 1u);
  EXPECT_EQ(t.table.run_timers(now + Line::kGreetNs + 1), UINT64_MAX);
  EXPECT_TRUE(t.table.all().empty());
  EXPECT_EQ(t.owner.downs, 1);
}

TEST_F(LineOfKeepers, TableOpensALineOnceAndFindsItByKeeper) {
  Table t;
  wire::FourTuple ends;
  {
    const Connection c = Connection::make(false, false);
    sockaddr_in a;
    sockaddr_in b;
    socklen_t len = sizeof(a);
    ::getsockname(c.left, reinterpret_cast<sockaddr*>(&a), &len);
    ::getpeername(c.left, reinterpret_cast<sockaddr*>(&b), &len);
    ends = *wire::FourTuple::from(reinterpret_cast<sockaddr*>(&a), sizeof(a),
                                  reinterpret_cast<sockaddr*>(&b), sizeof(b));
  }
  wire::Endpoint there = ends.remote;
  there.port = t.table.port();
  const auto line = t.table.open(ends.local, there);
  ASSERT_TRUE(line);
  EXPECT_EQ(t.table.open(ends.local, there), line);
  EXPECT_TRUE(eventually([&] {
    t.table.on_event(EPOLLIN);
    for (const auto& each : t.table.all()) each->on_event(EPOLLIN | EPOLLOUT);
    return t.owner.opened == 2;  // to itself: both ends are in the table
  }));
  EXPECT_EQ(t.table.find(11, ends.local, ends.remote), line);
  EXPECT_EQ(t.table.find(12, ends.local, ends.remote), nullptr);
}

}  // namespace
}  // namespace rsock
