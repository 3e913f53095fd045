#include "core/stream/fd_table.h"

#include <thread>
#include <vector>

#include "tests/stream/loopback.h"

namespace rsock::stream {
namespace {

alignas(8) char g_object[64];

TEST(FdTable, ANumberNobodySetIsTheKernelsAlone) {
  EXPECT_EQ(FdTable::word(700), 0u);
  EXPECT_EQ(FdTable::kind(700), FdKind::kUnknown);
  EXPECT_EQ(FdTable::stream(700), nullptr);
}

TEST(FdTable, NumbersOutsideTheTableAreNeverOurs) {
  for (const int fd : {-1, INT32_MIN, FdTable::kSize, FdTable::kSize + 1, INT32_MAX}) {
    EXPECT_EQ(FdTable::word(fd), 0u) << fd;
    EXPECT_EQ(FdTable::set(fd, FdKind::kTcpSocket), 0u) << fd;
    EXPECT_EQ(FdTable::word(fd), 0u) << fd;
  }
}

TEST(FdTable, TheLastNumberIsInside) {
  const int last = FdTable::kSize - 1;
  FdTable::set(last, FdKind::kInternal);
  EXPECT_EQ(FdTable::kind(last), FdKind::kInternal);
  EXPECT_EQ(FdTable::highest(), last);
  FdTable::clear(last);
}

TEST(FdTable, AnObjectComesBackUnderItsOwnKindOnly) {
  FdTable::set(701, FdKind::kEpoll, g_object);
  EXPECT_EQ(FdTable::object(701, FdKind::kEpoll), g_object);
  EXPECT_EQ(FdTable::object(701, FdKind::kStream), nullptr);
  EXPECT_EQ(FdTable::stream(701), nullptr);
  FdTable::clear(701);
}

TEST(FdTable, SetAndClearTellWhatWasThere) {
  EXPECT_EQ(FdTable::set(702, FdKind::kStream, g_object), 0u);
  EXPECT_EQ(FdTable::kind_of(FdTable::set(702, FdKind::kTcpSocket)), FdKind::kStream);
  EXPECT_EQ(FdTable::kind_of(FdTable::clear(702)), FdKind::kTcpSocket);
  EXPECT_EQ(FdTable::clear(702), 0u);
}

TEST(FdTable, OfManyThreadsThatClearOneSlotExactlyOneGetsTheObject) {
  for (int round = 0; round < 200; ++round) {
    FdTable::set(703, FdKind::kStream, g_object);
    std::atomic<int> winners{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back(
          [&] { winners += FdTable::kind_of(FdTable::clear(703)) == FdKind::kStream; });
    }
    for (std::thread& t : threads) t.join();
    ASSERT_EQ(winners, 1);
  }
}

// --- descriptors of streams
// ---------------------------------------------------------------------------

class Descriptors : public ::testing::Test {
 protected:
  void SetUp() override { testing::configure(); }
};

TEST_F(Descriptors, ADuplicateIsTheSameStreamUntilTheLastNumberGoes) {
  auto c = testing::Connection::make();
  Stream* s = FdTable::stream(c.left);
  const int copy = ::dup(c.left);
  on_dup(c.left, copy);
  EXPECT_EQ(FdTable::stream(copy), s);
  ASSERT_TRUE(testing::ping_until_lifted(c));
  testing::close_fd(std::exchange(c.left, copy));
  EXPECT_EQ(FdTable::stream(copy), s);
  EXPECT_FALSE(s->closed.load());
  EXPECT_EQ(s->fd.load(), copy) << "the keeper uses the number that is left";
  EXPECT_TRUE(testing::echoes(c.left, c.right, 100'000));
}

TEST_F(Descriptors, OfTwoClosesOfOneNumberOnlyTheFirstClosesTheStream) {
  auto c = testing::Connection::make();
  const uint32_t generation = FdTable::stream(c.left)->generation.load();
  Stream* s = FdTable::stream(c.left);
  EXPECT_TRUE(before_close(c.left));
  EXPECT_EQ(FdTable::word(c.left), 0u) << "cleared before the number can be used again";
  EXPECT_EQ(s->generation.load(), generation + 1);
  EXPECT_TRUE(before_close(c.left));
  EXPECT_EQ(s->generation.load(), generation + 1);
  ::close(std::exchange(c.left, -1));
}

TEST_F(Descriptors, AnInternalNumberCannotBeClosedByTheProgram) {
  FdTable::set(800, FdKind::kInternal);
  EXPECT_FALSE(before_close(800));
  EXPECT_EQ(FdTable::kind(800), FdKind::kInternal);
  FdTable::clear(800);
}

TEST_F(Descriptors, ARangeSkipsTheInternalNumbersAndOnlyThem) {
  using Ranges = std::vector<std::pair<unsigned, unsigned>>;
  const auto ranges = [](unsigned first, unsigned last) {
    Ranges r;
    for_each_program_range(
        first, last,
        [](unsigned a, unsigned b, void* out) { static_cast<Ranges*>(out)->emplace_back(a, b); },
        &r);
    return r;
  };
  FdTable::set(900, FdKind::kInternal);
  FdTable::set(902, FdKind::kInternal);
  EXPECT_EQ(ranges(890, 910), (Ranges{{890, 899}, {901, 901}, {903, 910}}));
  EXPECT_EQ(ranges(900, 900), Ranges{});
  EXPECT_EQ(ranges(900, 902), (Ranges{{901, 901}}));
  EXPECT_EQ(ranges(903, ~0u), (Ranges{{903, ~0u}}));
  EXPECT_EQ(ranges(~0u, ~0u), (Ranges{{~0u, ~0u}}));
  FdTable::clear(900);
  FdTable::clear(902);
  EXPECT_EQ(ranges(900, 902), (Ranges{{900, 902}}));
}

TEST_F(Descriptors, SocketsThatAreNoTcpAreNotOurs) {
  on_socket(810, AF_UNIX, SOCK_STREAM, 0);
  on_socket(811, AF_INET, SOCK_DGRAM, 0);
  on_socket(812, AF_INET, SOCK_STREAM, IPPROTO_SCTP);
  on_socket(-1, AF_INET, SOCK_STREAM, 0);
  for (const int fd : {810, 811, 812}) EXPECT_EQ(FdTable::word(fd), 0u);
  on_socket(813, AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
  EXPECT_EQ(FdTable::kind(813), FdKind::kTcpSocket);
  on_connect(813, -ECONNREFUSED);
  EXPECT_EQ(FdTable::kind(813), FdKind::kTcpSocket) << "refused: still a socket, no stream";
  before_close(813);
  EXPECT_EQ(FdTable::word(813), 0u);
}

}  // namespace
}  // namespace rsock::stream
