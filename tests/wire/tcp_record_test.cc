#include "core/wire/tcp_record.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

namespace rsock::wire {
namespace {

using Kind = RecordDecoder::Kind;
using Bytes = std::vector<uint8_t>;

void append(Bytes* out, const Record& r, const std::string& data = "") {
  uint8_t header[kRecordSize];
  encode(r, header);
  out->insert(out->end(), header, header + kRecordSize);
  out->insert(out->end(), data.begin(), data.end());
}

Record data_record(const std::string& data, uint64_t offset) {
  return Record{RecordType::kData, 3, static_cast<uint32_t>(data.size()), offset};
}

/// What a decoder said, as text: "type@offset " for records, the bytes themselves, "!reason" at
/// last.
std::string decode(const Bytes& in, const std::function<size_t()>& step) {
  RecordDecoder d;
  std::string said;
  for (size_t at = 0; at < in.size();) {
    size_t n = std::min(step(), in.size() - at);
    const Bytes piece(in.begin() + static_cast<long>(at), in.begin() + static_cast<long>(at + n));
    for (size_t p = 0; p < n;) {
      const auto e = d.next(piece.data() + p, n - p);
      if (e.kind == Kind::kBroken) return said + "!" + e.reason;
      if (e.kind == Kind::kRecord) {
        said += std::to_string(static_cast<int>(e.record.type)) + "@" +
                std::to_string(e.record.offset) + " ";
      }
      said.append(e.bytes.begin(), e.bytes.end());
      EXPECT_GT(e.used, 0u);
      p += e.used;
    }
    at += n;
  }
  return said;
}

Bytes some_stream() {
  Bytes b;
  append(&b, Record{RecordType::kUp, 1, 0, 10});
  append(&b, data_record("hello ", 10), "hello ");
  append(&b, Record{RecordType::kReturn, 2, 0, 99});
  append(&b, data_record("w", 16), "w");
  append(&b, data_record("orld ", 17), "orld ");
  append(&b, Record{RecordType::kEnd, 2, 0, 7});
  append(&b, Record{RecordType::kRaw, 2, 0, 22});
  for (char c : std::string("raw bytes")) b.push_back(static_cast<uint8_t>(c));
  return b;
}
constexpr char kSaid[] = "4@10 1@10 hello 2@99 1@16 w1@17 orld 3@7 5@22 raw bytes";

TEST(TcpRecord, ComesBackWhole) {
  EXPECT_EQ(decode(some_stream(), [] { return SIZE_MAX; }), kSaid);
}

TEST(TcpRecord, ComesBackByteByByte) {
  EXPECT_EQ(decode(some_stream(), [] { return 1; }), kSaid);
}

TEST(TcpRecord, ComesBackFromAnySplit) {
  std::mt19937 random(7);
  for (int i = 0; i < 2000; ++i) {
    ASSERT_EQ(decode(some_stream(), [&] { return 1 + random() % 40; }), kSaid);
  }
}

TEST(TcpRecord, LayoutIsLittleEndianAtFixedPlaces) {
  uint8_t out[kRecordSize];
  encode(Record{RecordType::kData, 0x01020304, 5, 0x1122334455667788}, out);
  EXPECT_EQ(Bytes(out, out + kRecordSize),
            (Bytes{'R', 'S', 1, 0, 4,    3,    2,    1,    5,    0,    0,    0,
                   0,   0,   0, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11}));
}

TEST(TcpRecord, DataEventsCarryTheOffsetOfTheirFirstByte) {
  Bytes b;
  append(&b, data_record("abcdef", 100), "abcdef");
  RecordDecoder d;
  EXPECT_EQ(d.next(b.data(), kRecordSize).kind, Kind::kRecord);
  auto e = d.next(b.data() + kRecordSize, 2);
  EXPECT_EQ(e.record.offset, 100u);
  e = d.next(b.data() + kRecordSize + 2, 4);
  EXPECT_EQ(e.record.offset, 102u);
  EXPECT_EQ(std::string(e.bytes.begin(), e.bytes.end()), "cdef");
}

TEST(TcpRecord, WantedNeverReachesBeyondTheCurrentRecord) {
  const Bytes b = some_stream();
  RecordDecoder d;
  size_t at = 0;
  std::string said;
  while (d.wanted() != 0) {
    const size_t n = std::min<size_t>(d.wanted(), b.size() - at);
    const auto e = d.next(b.data() + at, n);
    ASSERT_NE(e.kind, Kind::kBroken);
    ASSERT_EQ(e.used, n);
    at += n;
  }
  EXPECT_EQ(std::string(b.begin() + static_cast<long>(at), b.end()), "raw bytes");
}

TEST(TcpRecord, KnowsWhenAnEndWouldCutARecord) {
  Bytes b;
  append(&b, data_record("ab", 0), "ab");
  RecordDecoder d;
  EXPECT_FALSE(d.inside_record());
  d.next(b.data(), 1);
  EXPECT_TRUE(d.inside_record());
  d.next(b.data() + 1, kRecordSize - 1);
  EXPECT_TRUE(d.inside_record());
  d.next(b.data() + kRecordSize, 2);
  EXPECT_FALSE(d.inside_record());
}

/// The reason for which a single changed header is refused.
std::string refusal(const std::function<void(RecordWire&)>& change) {
  Bytes b;
  append(&b, data_record("abc", 0), "abc");
  change(*reinterpret_cast<RecordWire*>(b.data()));
  return decode(b, [] { return 5; });
}

TEST(TcpRecord, RefusesWhatNoPeerSends) {
  EXPECT_EQ(refusal([](RecordWire& w) { w.magic = 0; }), "!record magic");
  EXPECT_EQ(refusal([](RecordWire& w) { w.type = 0; }), "!unknown record type");
  EXPECT_EQ(refusal([](RecordWire& w) { w.type = 7; }), "!unknown record type");
  EXPECT_EQ(refusal([](RecordWire& w) { w.zero = 1; }), "!reserved bytes used");
  EXPECT_EQ(refusal([](RecordWire& w) { w.zero2 = 1; }), "!reserved bytes used");
  EXPECT_EQ(refusal([](RecordWire& w) { w.length = 0; }), "!record without data");
  EXPECT_EQ(refusal([](RecordWire& w) { w.length = kMaxRecordData + 1; }), "!record too long");
  EXPECT_EQ(refusal([](RecordWire& w) { w.offset = UINT64_MAX - 1; }),
            "!record beyond the end of numbers");
  EXPECT_EQ(refusal([](RecordWire& w) { w.type = 4; }), "!length in a record without data");
}

TEST(TcpRecord, NothingFollowsTheEndOfTheStream) {
  Bytes b;
  append(&b, Record{RecordType::kFin, 0, 0, 5});
  EXPECT_EQ(decode(b, [] { return 100; }), "6@5 ");
  b.push_back(0);
  EXPECT_EQ(decode(b, [] { return 100; }), "6@5 !bytes behind the end of the stream");
}

TEST(TcpRecord, ABrokenDecoderStaysBroken) {
  RecordDecoder d;
  const uint8_t zeros[kRecordSize] = {};
  EXPECT_EQ(d.next(zeros, sizeof(zeros)).kind, Kind::kBroken);
  Bytes good;
  append(&good, Record{RecordType::kRaw, 0, 0, 0});
  const auto e = d.next(good.data(), good.size());
  EXPECT_EQ(e.kind, Kind::kBroken);
  EXPECT_STREQ(e.reason, "record magic");
}

}  // namespace
}  // namespace rsock::wire
