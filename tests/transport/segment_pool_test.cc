// A segment goes to the same partner again, and only after that partner has let go.

#include "core/transport/shm/segment_pool.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "core/base/clock.h"
#include "core/transport/shm/shm_channel.h"

namespace rsock::transport {
namespace {

constexpr size_t kRing = 64 * 1024;
constexpr Partner kPartner{4711, 1000};

struct Ends {
  std::unique_ptr<Channel> caller;
  std::unique_ptr<Channel> callee;
};

Ends make_ends(CreatedSegment created, Partner partner = kPartner) {
  auto adopted = adopt_segment(created.memfd.get(), created.segment.ring_size());
  EXPECT_TRUE(adopted) << adopted.error().reason;
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {make_shm_channel(std::move(created.segment), os::OwnedFd(fds[0]), true,
                           Reuse{std::move(created.memfd), partner, getpid()}),
          make_shm_channel(std::move(*adopted), os::OwnedFd(fds[1]), false)};
}

Ends fresh_ends() {
  auto created = create_segment(kRing);
  EXPECT_TRUE(created) << created.error().reason;
  return make_ends(std::move(*created));
}

class SegmentPool : public ::testing::Test {
 protected:
  void TearDown() override { (void)tidy_segments(UINT64_MAX); }
};

std::string through(Channel& from, Channel& to, const std::string& text) {
  iovec in{const_cast<char*>(text.data()), text.size()};
  EXPECT_EQ(from.tx_write(&in, 1, 0, text.size()), text.size());
  std::string out(text.size(), '\0');
  iovec space{out.data(), out.size()};
  out.resize(to.rx_read(&space, 1, 0, out.size(), false));
  return out;
}

TEST_F(SegmentPool, GivesBackWhatBothEndsLetGoOf) {
  Ends ends = fresh_ends();
  EXPECT_EQ(through(*ends.caller, *ends.callee, "first"), "first");
  const int mapped = live_segments();
  ends.callee.reset();
  ends.caller.reset();
  EXPECT_EQ(live_segments(), mapped - 1);  // the caller's is kept
  auto again = take_segment(kRing, kPartner);
  ASSERT_TRUE(again);
  // As new: empty rings, no seal, no sleeper.
  Ends second = make_ends(std::move(*again));
  EXPECT_EQ(second.caller->tx_unread(), 0u);
  EXPECT_EQ(second.callee->rx_available(), 0u);
  EXPECT_EQ(second.callee->tx_turn().kind, TurnKind::kOpen);
  EXPECT_FALSE(second.callee->rx_start().has_value());
  EXPECT_EQ(through(*second.callee, *second.caller, "second"), "second");
}

TEST_F(SegmentPool, WaitsForThePartnerToLetGo) {
  Ends ends = fresh_ends();
  ends.caller.reset();
  EXPECT_FALSE(take_segment(kRing, kPartner));
  // Its rings may still lie unread in the doorbell.
  iovec piece{const_cast<char*>("x"), 1};
  EXPECT_EQ(ends.callee->tx_write(&piece, 1, 0, 1), 1u);
  ends.callee->wake_peer();
  EXPECT_FALSE(take_segment(kRing, kPartner));
  ends.callee.reset();
  EXPECT_TRUE(take_segment(kRing, kPartner));
}

TEST_F(SegmentPool, LettingGoDoesNotLookAsIfThePartnerHad) {
  Ends ends = fresh_ends();
  ends.caller->let_go();
  char byte;
  EXPECT_EQ(recv(ends.callee->wait_fd(), &byte, 1, MSG_DONTWAIT), 0);
  ends.caller.reset();
  EXPECT_FALSE(take_segment(kRing, kPartner));
  ends.callee->let_go();  // a sleeper may still hold it
  EXPECT_TRUE(take_segment(kRing, kPartner));
}

TEST_F(SegmentPool, TellsThePartnerAtOnce) {
  Ends ends = fresh_ends();
  const int doorbell = ends.callee->wait_fd();
  ends.caller.reset();
  char byte;
  EXPECT_EQ(recv(doorbell, &byte, 1, MSG_DONTWAIT), 0);
}

TEST_F(SegmentPool, IsForTheSamePartnerAndSizeOnly) {
  Ends ends = fresh_ends();
  ends.callee.reset();
  ends.caller.reset();
  EXPECT_FALSE(take_segment(kRing, Partner{4712, 1000}));
  EXPECT_FALSE(take_segment(kRing, Partner{4711, 1001}));
  EXPECT_FALSE(take_segment(2 * kRing, kPartner));
  EXPECT_TRUE(take_segment(kRing, kPartner));
  EXPECT_FALSE(take_segment(kRing, kPartner));  // once
}

TEST_F(SegmentPool, TakesNothingFromAChannelThatWasLiedTo) {
  auto created = create_segment(kRing);
  ASSERT_TRUE(created);
  wire::ControlPage& page = created->segment.page();
  Ends ends = make_ends(std::move(*created));
  page.direction[0].head.store(kRing * 7);  // more than was ever written
  EXPECT_EQ(ends.caller->tx_room(), 0u);
  EXPECT_TRUE(ends.caller->tx_failed());
  ends.callee.reset();
  ends.caller.reset();
  EXPECT_FALSE(take_segment(kRing, kPartner));
}

TEST_F(SegmentPool, KeepsAFewAndForSeconds) {
  const int before = live_segments();
  for (int i = 0; i < 20; ++i) {
    Ends ends = fresh_ends();
    ends.callee.reset();
    ends.caller.reset();
  }
  EXPECT_LE(live_segments() - before, 8);
  EXPECT_TRUE(tidy_segments(monotonic_ns()));
  EXPECT_GT(live_segments() - before, 0);
  EXPECT_FALSE(tidy_segments(monotonic_ns() + 6'000'000'000u));
  EXPECT_EQ(live_segments(), before);
}

TEST_F(SegmentPool, AForkedChildParksAndKeepsNothing) {
  Ends ends = fresh_ends();
  Ends parked = fresh_ends();
  parked.callee.reset();
  parked.caller.reset();
  lock_segments();
  const pid_t pid = fork();
  if (pid == 0) {
    segments_after_fork_child();
    ends.caller.reset();
    _exit(take_segment(kRing, kPartner) ? 1 : 0);
  }
  unlock_segments();
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  // The child's closing told the partner nothing: the parent's channel lives.
  EXPECT_EQ(through(*ends.caller, *ends.callee, "still here"), "still here");
  char byte;
  EXPECT_EQ(recv(ends.callee->wait_fd(), &byte, 1, MSG_DONTWAIT | MSG_PEEK), -1);
  EXPECT_TRUE(take_segment(kRing, kPartner));
}

}  // namespace
}  // namespace rsock::transport
