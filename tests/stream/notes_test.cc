// What holders write on a connection, and who goes on with it by that.

#include "core/stream/notes.h"

#include "core/os/os.h"
#include "core/stream/hand_over.h"
#include "core/stream/holders.h"
#include "tests/stream/forking.h"

namespace rsock::stream {
namespace {

using namespace rsock::testing;

class Notes : public ::testing::Test {
 protected:
  void SetUp() override { configure({"RSOCK_RING_BYTES=65536"}); }
};

bool equal(const std::optional<Carried>& is, const Carried& wanted) {
  return is && is->connected_here == wanted.connected_here && is->tx_off_tcp == wanted.tx_off_tcp &&
         is->rx_off_tcp == wanted.rx_off_tcp;
}

TEST_F(Notes, SayWhatWasWrittenToEverybodyWhoHasTheConnection) {
  Connection c = Connection::make();
  constexpr uint32_t kMostKey = (1u << 22) - 1;
  const Carried all[] = {{false, 0, 0},
                         {true, 0, 0},
                         {true, 1, UINT64_MAX},
                         {false, UINT64_MAX, 1},
                         {true, 0x100000000, 0xffffffff}};
  for (const Carried& carried : all) {
    ASSERT_TRUE(write_carried(c.left, Way::kExec, kMostKey, carried));
    const int copy = ::dup(c.left);
    EXPECT_TRUE(equal(read_carried(copy, Way::kExec, kMostKey), carried));
    ::close(copy);
    const pid_t child = ::fork();
    if (child == 0) _exit(equal(read_carried(c.left, Way::kExec, kMostKey), carried) ? 0 : 1);
    EXPECT_EQ(wait_for(child), 0);
    EXPECT_FALSE(read_carried(c.right, Way::kExec, kMostKey)) << "the other end is another file";
    EXPECT_FALSE(read_carried(c.left, Way::kPassing, kMostKey));
    EXPECT_FALSE(read_carried(c.left, Way::kExec, kMostKey - 1));
    erase_carried(c.left, Way::kExec, kMostKey);
    EXPECT_FALSE(read_carried(c.left, Way::kExec, kMostKey));
    EXPECT_FALSE(others_hold(c.left, 0));
  }
  EXPECT_FALSE(write_carried(c.left, Way::kExec, kMostKey + 1, {}));
}

TEST_F(Notes, OfNeighboursAreToldApart) {
  Connection c = Connection::make();
  const Carried most{true, UINT64_MAX, UINT64_MAX};
  for (const uint32_t key : {7u, 8u, 9u}) ASSERT_TRUE(write_carried(c.left, Way::kExec, key, most));
  erase_carried(c.left, Way::kExec, 8);
  EXPECT_TRUE(equal(read_carried(c.left, Way::kExec, 7), most));
  EXPECT_FALSE(read_carried(c.left, Way::kExec, 8));
  EXPECT_TRUE(equal(read_carried(c.left, Way::kExec, 9), most));
  for (const uint32_t id : {1u, 2u, 3u, UINT32_MAX}) ASSERT_TRUE(write_holder(c.right, id));
  for (const uint32_t id : {1u, 3u, UINT32_MAX}) erase_holder(c.right, id);
  EXPECT_FALSE(others_hold(c.right, 2));
  EXPECT_TRUE(others_hold(c.right, 1));
  EXPECT_TRUE(others_hold(c.right, 3));
  EXPECT_TRUE(others_hold(c.right, 0));
}

TEST_F(Notes, EachKindMeansThatAnotherHoldsIt) {
  Connection c = Connection::make();
  EXPECT_FALSE(others_hold(c.left, 5));
  ASSERT_TRUE(write_holder(c.left, 5));
  EXPECT_FALSE(others_hold(c.left, 5));
  ASSERT_TRUE(write_holder(c.left, 6));
  EXPECT_TRUE(others_hold(c.left, 5));
  erase_holder(c.left, 6);
  ASSERT_TRUE(write_carried(c.left, Way::kPassing, 4711, {}));
  EXPECT_TRUE(others_hold(c.left, 5));
  EXPECT_EQ(find_passing(c.left), 4711u);
  erase_carried(c.left, Way::kPassing, 4711);
  EXPECT_FALSE(find_passing(c.left));
  ASSERT_TRUE(write_carried(c.left, Way::kExec, 4711, {}));
  EXPECT_TRUE(others_hold(c.left, 5));
  EXPECT_FALSE(find_passing(c.left));
}

/// As exec leaves it: the file at its number, and no memory of it.
void forget(int fd) {
  Stream& s = *FdTable::stream(fd);
  FdTable::clear(fd);
  s.in_exec = false;  // the note stays
  release_stream(s, fd);
}

void become_another_program(int fd) {
  leave_by_exec(*FdTable::stream(fd), fd);
  forget(fd);
  ASSERT_TRUE(is_left_to_us(fd));
  on_inherited(fd, true);
  ASSERT_NE(FdTable::stream(fd), nullptr);
}

TEST_F(Notes, TheNextProgramGoesOnAtTheSameByte) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  ASSERT_TRUE(echoes(c.left, c.right, 5'000));
  ASSERT_TRUE(echoes(c.right, c.left, 5'000));
  ASSERT_EQ(do_send(c.left, "unread by the peer", 18), 18);
  ASSERT_EQ(do_send(c.right, "unread here", 11), 11);
  for (const int fd : {c.left, c.right}) {
    Stream& before = *FdTable::stream(fd);
    (void)pin(before, kExec);
    ASSERT_TRUE(set_down_and_wait(before, kExec));
    const uint64_t sent = before.tx.offset;
    const uint64_t received = before.rx.offset;
    const uint64_t off_tcp = before.tx.off_tcp;
    ASSERT_NE(off_tcp, 0u);
    become_another_program(fd);
    Stream& after = *FdTable::stream(fd);
    EXPECT_EQ(after.tx.offset, sent);
    EXPECT_EQ(after.rx.offset, received);
    EXPECT_EQ(after.tx.off_tcp, off_tcp);
    EXPECT_TRUE(sole_holder(after));
  }
  char buffer[32] = {};
  EXPECT_EQ(do_recv(c.right, buffer, 18, MSG_WAITALL), 18);
  EXPECT_STREQ(buffer, "unread by the peer");
  EXPECT_EQ(do_recv(c.left, buffer, 11, MSG_WAITALL), 11);
  EXPECT_EQ(memcmp(buffer, "unread here", 11), 0);
  EXPECT_TRUE(ping_until_lifted(c));
}

TEST_F(Notes, NobodyTakesOverWhatIsNotTracked) {
  Connection c = Connection::make();
  const int fd = c.left;
  leave_by_exec(*FdTable::stream(fd), fd);
  forget(fd);
  ASSERT_TRUE(is_left_to_us(fd));
  on_inherited(fd, false);
  EXPECT_EQ(FdTable::stream(fd), nullptr);
  EXPECT_FALSE(is_left_to_us(fd)) << "nor does a later program in the same process";
  EXPECT_TRUE(others_hold(fd, 0)) << "whoever has it too knows of one more for ever";
}

TEST_F(Notes, AFailedExecComesBackAsAHolder) {
  Connection c = Connection::make();
  Stream& s = *FdTable::stream(c.left);
  leave_by_exec(s, c.left);
  EXPECT_TRUE(is_left_to_us(c.left));
  come_back_from_exec(s);
  EXPECT_FALSE(read_carried(c.left, Way::kExec, static_cast<uint32_t>(os::getpid())));
  EXPECT_TRUE(sole_holder(s));
  EXPECT_TRUE(others_hold(c.left, 0));
}

/// Another thread forks, or spawns, while this one is on its way into exec.
TEST_F(Notes, WhoGetsItDuringAnExecIsKnownToTheNextProgram) {
  for (const bool spawned : {false, true}) {
    Connection c = Connection::make();
    keep_over_exec(c.left);
    leave_by_exec(*FdTable::stream(c.left), c.left);
    if (spawned) {
      before_spawn();
    } else {
      add_holder_to_all();
    }
    forget(c.left);
    on_inherited(c.left, true);
    ASSERT_NE(FdTable::stream(c.left), nullptr);
    EXPECT_FALSE(sole_holder(*FdTable::stream(c.left)));
  }
}

TEST_F(Notes, APassedDescriptorThatIsSeenTwiceIsOneStream) {
  Connection c = Connection::make();
  Stream& s = *FdTable::stream(c.left);
  ASSERT_TRUE(write_carried(c.left, Way::kPassing, 1, {}));
  const int peeked = ::dup(c.left);
  const int got = ::dup(c.left);
  on_received(peeked);
  on_received(got);
  EXPECT_EQ(FdTable::stream(peeked), &s);
  EXPECT_EQ(FdTable::stream(got), &s);
  EXPECT_FALSE(find_passing(c.left));
  close_fd(peeked);
  close_fd(got);
}

TEST_F(Notes, WhatWasGivenAwayUnseenIsLeftToNobody) {
  Connection c = Connection::make();
  keep_over_exec(c.left);
  before_spawn();
  leave_by_exec(*FdTable::stream(c.left), c.left);
  forget(c.left);
  EXPECT_FALSE(is_left_to_us(c.left));
}

TEST_F(Notes, TheFamilyOfAForkAndAnExecedChildKnowOfEachOther) {
  Connection c = Connection::make();
  ASSERT_TRUE(ping_until_lifted(c));
  int go[2];
  int came[2];
  ASSERT_EQ(::pipe(go), 0);
  ASSERT_EQ(::pipe(came), 0);
  const pid_t child = fork_with_hooks();
  if (child == 0) {
    char byte = 0;
    become_another_program(c.left);
    const bool shared = !sole_holder(*FdTable::stream(c.left));
    (void)!::write(came[1], "x", 1);
    (void)!::read(go[0], &byte, 1);
    const bool alone = sole_holder(*FdTable::stream(c.left));
    close_fd(c.left);
    (void)!::write(came[1], "x", 1);
    _exit((shared ? 0 : 1) + (alone ? 0 : 2));
  }
  char byte = 0;
  ASSERT_EQ(::read(came[0], &byte, 1), 1);
  EXPECT_FALSE(sole_holder(*FdTable::stream(c.left)));
  const int kept = ::dup(c.left);  // unknown to the library: only to look at what is written
  close_fd(c.left);
  ASSERT_EQ(::write(go[1], "x", 1), 1);
  ASSERT_EQ(::read(came[0], &byte, 1), 1);
  EXPECT_FALSE(others_hold(kept, 0)) << "both have taken theirs back";
  EXPECT_EQ(wait_for(child), 0);
  for (const int fd : {kept, go[0], go[1], came[0], came[1]}) ::close(fd);
  c.left = -1;
}

}  // namespace
}  // namespace rsock::stream
