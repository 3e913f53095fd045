#include "core/wire/cm_data.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "tests/wire/tuples.h"

namespace rsock::wire {
namespace {

using Bytes = std::vector<uint8_t>;

const Find kSomeFind{.nonce = 0x0123456789abcdef, .tuple = across_hosts()};
const Found kSomeFound{.nonce = 3, .line_port = 4321, .keeper = 0x1122334455667788};
const Join kSomeJoin{.nonce = 3,
                     .ring_address = 0x7f0000001000,
                     .ring_key = 0xa0b0c0d0,
                     .ring_size = 1 << 20,
                     .mac = 0x8877665544332211};

template <typename M>
Bytes bytes_of(const M& m, size_t padding = 0) {
  constexpr size_t kSize = std::is_same_v<M, Find>    ? kFindSize
                           : std::is_same_v<M, Found> ? kFoundSize
                                                      : kJoinSize;
  Bytes b(kSize + padding);
  encode(m, b.data());
  return b;
}

Checked<Find> find(const Bytes& b) { return decode_find(b.data(), b.size()); }
Checked<Found> found(const Bytes& b) { return decode_found(b.data(), b.size()); }
Checked<Join> join(const Bytes& b) { return decode_join(b.data(), b.size()); }
int accepted_by(const Bytes& b) { return bool(find(b)) + bool(found(b)) + bool(join(b)); }

TEST(CmData, ComesBackAsItWasSentWhateverZerosFollow) {
  for (const size_t padding : {0u, 1u, 164u}) {
    const auto a = find(bytes_of(kSomeFind, padding));
    ASSERT_TRUE(a);
    EXPECT_EQ(a->nonce, kSomeFind.nonce);
    EXPECT_EQ(a->tuple, kSomeFind.tuple);
    const auto b = found(bytes_of(kSomeFound, padding));
    ASSERT_TRUE(b);
    EXPECT_EQ(b->nonce, 3u);
    EXPECT_EQ(b->verdict, Verdict::kOk);
    EXPECT_EQ(b->line_port, 4321);
    EXPECT_EQ(b->keeper, kSomeFound.keeper);
    const auto c = join(bytes_of(kSomeJoin, padding));
    ASSERT_TRUE(c);
    EXPECT_EQ(c->nonce, 3u);
    EXPECT_EQ(c->ring_address, kSomeJoin.ring_address);
    EXPECT_EQ(c->ring_key, kSomeJoin.ring_key);
    EXPECT_EQ(c->ring_size, kSomeJoin.ring_size);
    EXPECT_EQ(c->mac, kSomeJoin.mac);
  }
}

// 56 bytes are what is left of a request's 92 behind the connection manager's own header.
TEST(CmData, FitsTheSmallestPrivateDataOfItsMessage) {
  EXPECT_LE(kFindSize, 56u);
  EXPECT_LE(kJoinSize, 56u);
  EXPECT_LE(kFoundSize, 148u);
}

TEST(CmData, LayoutIsLittleEndianAtFixedPlaces) {
  const Bytes b = bytes_of(kSomeFind);
  EXPECT_EQ(Bytes(b.begin(), b.begin() + 10),
            (Bytes{'R', 'K', 'C', 'M', 1, 1, 0xca, 0xa8, 0x51, 0x14}));
  EXPECT_EQ(Bytes(b.begin() + 42, b.begin() + 50),
            (Bytes{0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01}));
}

TEST(CmData, EveryTruncationIsRefusedWithoutReadingOn) {
  for (const Bytes& b : {bytes_of(kSomeFind), bytes_of(kSomeFound), bytes_of(kSomeJoin)}) {
    EXPECT_EQ(accepted_by(b), 1);
    for (size_t n = 0; n < b.size(); ++n) {
      EXPECT_EQ(accepted_by(Bytes(b.begin(), b.begin() + static_cast<long>(n))), 0) << n;
    }
  }
}

TEST(CmData, EveryByteOfTheBeginningCounts) {
  for (const Bytes& good : {bytes_of(kSomeFind), bytes_of(kSomeFound), bytes_of(kSomeJoin)}) {
    for (size_t at = 0; at < 6; ++at) {
      Bytes b = good;
      b[at] ^= 0x40;
      EXPECT_EQ(accepted_by(b), 0) << at;
    }
  }
}

TEST(CmData, RefusesAnythingBehindItself) {
  for (const size_t at : {0u, 1u, 7u}) {
    Bytes a = bytes_of(kSomeFind, 8), b = bytes_of(kSomeFound, 8), c = bytes_of(kSomeJoin, 8);
    a[kFindSize + at] = b[kFoundSize + at] = c[kJoinSize + at] = 1;
    EXPECT_STREQ(find(a).error().reason, "bytes behind the private data");
    EXPECT_STREQ(found(b).error().reason, "bytes behind the private data");
    EXPECT_STREQ(join(c).error().reason, "bytes behind the private data");
  }
}

// So that the asked end can answer with Verdict::kVersion.
TEST(CmData, AnotherVersionIsToldFromNonsense) {
  Bytes a = bytes_of(kSomeFind, 8), b = bytes_of(kSomeFound), c = bytes_of(kSomeJoin);
  a[4] = b[4] = c[4] = 2;
  a.back() = 1;  // wherever that version has its fields
  EXPECT_TRUE(find(a).error().error == EPROTONOSUPPORT);
  EXPECT_TRUE(found(b).error().error == EPROTONOSUPPORT);
  EXPECT_TRUE(join(c).error().error == EPROTONOSUPPORT);
}

TEST(CmType, SaysWhatARequestCarries) {
  const auto type = [](const Bytes& b) { return decode_cm_type(b.data(), b.size()); };
  ASSERT_TRUE(type(bytes_of(kSomeFind)) && type(bytes_of(kSomeJoin)));
  EXPECT_EQ(*type(bytes_of(kSomeFind)), CmType::kFind);
  EXPECT_EQ(*type(bytes_of(kSomeJoin)), CmType::kJoin);
  EXPECT_STREQ(type(bytes_of(kSomeFound)).error().reason, "private data type");
  Bytes b = bytes_of(kSomeFind);
  b[4] = 9;  // the version is the decoder's matter
  EXPECT_TRUE(type(b));
  b[0] = 0;
  EXPECT_STREQ(type(b).error().reason, "private data magic");
  for (size_t n = 0; n < 6; ++n) EXPECT_FALSE(type(Bytes(n, 'R'))) << n;
}

TEST(CmFind, RefusesEveryConnectionThatLeadsToNoOtherHost) {
  for (const FourTuple& t : {across_hosts_v6(), across_hosts().reverse(), over_loopback()}) {
    EXPECT_TRUE(find(bytes_of(Find{.tuple = t})));
  }
  for (const auto& [why, tuple] : impossible_tuples()) {
    const auto got = find(bytes_of(Find{.tuple = tuple}));
    ASSERT_FALSE(got) << why;
    EXPECT_STREQ(got.error().reason, why);
  }
}

TEST(CmFind, RefusesReservedBytes) {
  for (size_t at = kFindSize - 6; at < kFindSize; ++at) {
    Bytes b = bytes_of(kSomeFind);
    b[at] = 1;
    EXPECT_STREQ(find(b).error().reason, "reserved bytes used");
  }
}

/// A good message with one thing changed, and the reason with which it must be refused.
void found_refused(const char* why, const std::function<void(FoundWire&)>& change) {
  Bytes b = bytes_of(kSomeFound);
  change(*reinterpret_cast<FoundWire*>(b.data()));
  const auto got = found(b);
  ASSERT_FALSE(got) << why;
  EXPECT_STREQ(got.error().reason, why);
}

TEST(CmFound, HasAPortWhenItAgreesAndNoneWhenItRefuses) {
  EXPECT_TRUE(found(bytes_of(Found{.verdict = Verdict::kNotMine})));
  found_refused("agreed without a port", [](FoundWire& w) { w.line_port = 0; });
  found_refused("a port in a refusal", [](FoundWire& w) { w.verdict = 1; });
  found_refused("unknown verdict", [](FoundWire& w) { w.verdict = kLastVerdict + 1; });
  found_refused("reserved bytes used", [](FoundWire& w) { w.zero[0] = 1; });
  found_refused("reserved bytes used", [](FoundWire& w) { w.zero[2] = 0x100; });
}

void join_refused(const char* why, const std::function<void(JoinWire&)>& change) {
  Bytes b = bytes_of(kSomeJoin);
  change(*reinterpret_cast<JoinWire*>(b.data()));
  const auto got = join(b);
  ASSERT_FALSE(got) << why;
  EXPECT_STREQ(got.error().reason, why);
}

TEST(CmJoin, RefusesEveryFieldOutOfBounds) {
  join_refused("reserved bytes used", [](JoinWire& w) { w.zero = 1; });
  join_refused("reserved bytes used", [](JoinWire& w) { w.zero2 = uint64_t{1} << 63; });
  for (const uint32_t size : {0u, 1u << 15, (1u << 20) + 1, 1u << 27, UINT32_MAX}) {
    join_refused("ring size out of range", [&](JoinWire& w) { w.ring_size = size; });
  }
}

TEST(CmJoin, TheRingEndsBeforeTheAddressesDo) {
  Join m = kSomeJoin;
  m.ring_address = UINT64_MAX - m.ring_size;
  EXPECT_TRUE(join(bytes_of(m)));
  for (const uint64_t more : {uint64_t{1}, uint64_t{2}, uint64_t{m.ring_size}}) {
    join_refused("ring beyond the end of memory",
                 [&](JoinWire& w) { w.ring_address = UINT64_MAX - w.ring_size + more; });
  }
}

}  // namespace
}  // namespace rsock::wire
