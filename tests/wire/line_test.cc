#include "core/wire/line.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <vector>

#include "tests/wire/tuples.h"

namespace rsock::wire {
namespace {

using Bytes = std::vector<uint8_t>;

// One name for the layout and the decoder that belong to a message.
template <typename M>
struct Of;
template <>
struct Of<Greeting> {
  using Wire = GreetingWire;
  static constexpr auto kDecode = decode_greeting;
};
template <>
struct Of<Proof> {
  using Wire = ProofWire;
  static constexpr auto kDecode = decode_proof;
};
template <>
struct Of<Want> {
  using Wire = WantWire;
  static constexpr auto kDecode = decode_want;
};
template <>
struct Of<Offer> {
  using Wire = OfferWire;
  static constexpr auto kDecode = decode_offer;
};
template <>
struct Of<WordMessage> {
  using Wire = WordWire;
  static constexpr auto kDecode = decode_word;
};

template <typename M>
Bytes bytes_of(const M& m) {
  Bytes b(sizeof(typename Of<M>::Wire));
  encode(m, b.data());
  return b;
}

template <typename M>
Checked<M> back(const M& m) {
  const Bytes b = bytes_of(m);
  return Of<M>::kDecode(b.data(), b.size());
}

/// A good message with one thing changed, and the reason with which it must be refused.
template <typename M>
void refused(const M& m, const char* reason,
             const std::function<void(typename Of<M>::Wire&)>& change, int error = EPROTO) {
  typename Of<M>::Wire w;
  std::memcpy(&w, bytes_of(m).data(), sizeof(w));
  change(w);
  const auto got = Of<M>::kDecode(reinterpret_cast<const uint8_t*>(&w), sizeof(w));
  ASSERT_FALSE(got) << reason;
  EXPECT_STREQ(got.error().reason, reason);
  EXPECT_TRUE(got.error().error == error) << reason;
}

const Greeting kSomeGreeting{.keyed = true, .keeper = 0x0123456789abcdef, .challenge = 5};
const Want kSomeWant{.nonce = 0x1122334455667788, .ring_size = 1 << 20, .tuple = across_hosts()};
const Offer kSomeOffer{.nonce = 7, .rdma_port = 4321};
const WordMessage kSomeWord{.nonce = 7, .word = Word::kStart, .value = 1000};

Proof some_proof() {
  Proof m;
  for (size_t i = 0; i < m.mac.size(); ++i) m.mac[i] = static_cast<uint8_t>(i + 1);
  return m;
}

std::vector<Bytes> one_of_each() {
  return {bytes_of(kSomeGreeting), bytes_of(some_proof()), bytes_of(kSomeWant),
          bytes_of(kSomeOffer), bytes_of(kSomeWord)};
}

int accepted_by(const uint8_t* data, size_t n) {
  return bool(decode_greeting(data, n)) + bool(decode_proof(data, n)) + bool(decode_want(data, n)) +
         bool(decode_offer(data, n)) + bool(decode_word(data, n));
}

TEST(LineMessages, ComeBackAsTheyWereSent) {
  const auto greeting = back(kSomeGreeting);
  ASSERT_TRUE(greeting);
  EXPECT_TRUE(greeting->keyed);
  EXPECT_EQ(greeting->keeper, kSomeGreeting.keeper);
  EXPECT_EQ(greeting->challenge, 5u);
  ASSERT_TRUE(back(some_proof()));
  EXPECT_EQ(back(some_proof())->mac, some_proof().mac);
  for (const FourTuple& t : {across_hosts(), across_hosts_v6(), over_loopback()}) {
    Want m = kSomeWant;
    for (m.tuple = t; const bool again : {true, false}) {
      const auto want = back(m);
      ASSERT_TRUE(want) << want.error().reason;
      EXPECT_EQ(want->nonce, m.nonce);
      EXPECT_EQ(want->ring_size, m.ring_size);
      EXPECT_EQ(want->tuple, m.tuple);
      if (again) m.tuple = t.reverse();  // whoever connected calls, whatever the addresses
    }
  }
  const auto offer = back(kSomeOffer);
  ASSERT_TRUE(offer);
  EXPECT_EQ(offer->nonce, 7u);
  EXPECT_EQ(offer->verdict, Verdict::kOk);
  EXPECT_EQ(offer->rdma_port, 4321);
  const auto word = back(kSomeWord);
  ASSERT_TRUE(word);
  EXPECT_EQ(word->nonce, 7u);
  EXPECT_EQ(word->word, Word::kStart);
  EXPECT_EQ(word->value, 1000u);
}

TEST(LineMessages, LayoutIsLittleEndianAtFixedPlaces) {
  EXPECT_EQ(bytes_of(kSomeWord),
            (Bytes{'R', 'K', 'L', 'N', 32, 0, 5, 0, 7,    0, 0, 0, 0, 0, 0, 0,
                   2,   0,   0,   0,   0,  0, 0, 0, 0xe8, 3, 0, 0, 0, 0, 0, 0}));
  const Bytes want = bytes_of(kSomeWant);
  EXPECT_EQ(Bytes(want.begin() + 48, want.end()), (Bytes{0xca, 0xa8, 0x51, 0x14, 0, 0, 0x10, 0}));
}

TEST(LineMessages, EveryOtherSizeIsRefusedWithoutReadingOn) {
  for (const Bytes& b : one_of_each()) {
    EXPECT_EQ(accepted_by(b.data(), b.size()), 1);
    for (size_t n = 0; n < b.size(); ++n) {
      const Bytes cut(b.begin(), b.begin() + static_cast<long>(n));  // ASan guards its end
      EXPECT_EQ(accepted_by(cut.data(), n), 0) << n;
    }
    Bytes longer = b;
    longer.push_back(0);
    EXPECT_EQ(accepted_by(longer.data(), longer.size()), 0);
  }
}

TEST(LineMessages, EveryByteOfTheHeaderCounts) {
  for (const Bytes& good : one_of_each()) {
    for (size_t at = 0; at < sizeof(HeaderWire); ++at) {
      Bytes b = good;
      b[at] ^= 0x40;
      EXPECT_EQ(accepted_by(b.data(), b.size()), 0) << at;
      EXPECT_FALSE(decode_line_head(b.data(), b.size())) << at;
    }
  }
}

TEST(LineHead, SaysWhatBeginsAndHowLongItIs) {
  uint16_t type = 1;
  for (const Bytes& b : one_of_each()) {
    for (size_t n = 0; n < sizeof(HeaderWire); ++n) {
      const Bytes cut(b.begin(), b.begin() + static_cast<long>(n));
      EXPECT_FALSE(decode_line_head(cut.data(), n));
    }
    const auto head = decode_line_head(b.data(), sizeof(HeaderWire));
    ASSERT_TRUE(head);
    EXPECT_EQ(static_cast<uint16_t>(head->type), type++);
    EXPECT_EQ(head->size, b.size());
    EXPECT_LE(head->size, kLongestLineMessage);
  }
}

TEST(LineHead, RefusesTheNextTypeAndAnotherTypesLength) {
  Bytes b = bytes_of(kSomeWord);
  b[6] = 6;
  EXPECT_STREQ(decode_line_head(b.data(), b.size()).error().reason, "message type");
  b[6] = 0;
  EXPECT_STREQ(decode_line_head(b.data(), b.size()).error().reason, "message type");
  b[6] = 2;
  EXPECT_STREQ(decode_line_head(b.data(), b.size()).error().reason, "message length");
}

TEST(LineGreeting, RefusesEveryFieldOutOfBounds) {
  const auto bad = [](const char* why, auto change, int error = EPROTO) {
    refused<Greeting>(kSomeGreeting, why, change, error);
  };
  using W = GreetingWire;
  bad("version range upside down", [](W& w) { w.version_min = kProtocolVersion + 1; });
  bad(
      "no version in common", [](W& w) { w.version_min = w.version_max = kProtocolVersion + 1; }, EPROTONOSUPPORT);
  bad(
      "no version in common", [](W& w) { w.version_min = w.version_max = 0; }, EPROTONOSUPPORT);
  bad("keyed is neither 0 nor 1", [](W& w) { w.keyed = 2; });
  bad("keyed is neither 0 nor 1", [](W& w) { w.keyed = 0x100; });
  bad("reserved bytes used", [](W& w) { w.zero = 1; });
}

TEST(LineGreeting, AcceptsARangeThatHoldsOurVersion) {
  Greeting m = kSomeGreeting;
  m.version_min = 0;
  m.version_max = 9;
  ASSERT_TRUE(back(m));
  EXPECT_EQ(back(m)->version_max, 9);
}

TEST(LineWant, RefusesEveryRingThatIsNone) {
  for (const uint32_t size : {0u, 1u << 15, (1u << 20) + 1, 1u << 27, UINT32_MAX}) {
    refused<Want>(kSomeWant, "ring size out of range", [&](WantWire& w) { w.ring_size = size; });
  }
}

TEST(LineWant, RefusesEveryConnectionThatLeadsToNoOtherHost) {
  for (const auto& [why, tuple] : impossible_tuples()) {
    Want m = kSomeWant;
    m.tuple = tuple;
    const auto got = back(m);
    ASSERT_FALSE(got) << why;
    EXPECT_STREQ(got.error().reason, why);
  }
}

TEST(LineOffer, HasAPortWhenItAgreesAndNoneWhenItRefuses) {
  EXPECT_TRUE(back(Offer{.verdict = Verdict::kMalformed}));
  const auto bad = [](const char* why, auto change) { refused<Offer>(kSomeOffer, why, change); };
  using W = OfferWire;
  bad("agreed without a port", [](W& w) { w.rdma_port = 0; });
  bad("a port in a refusal", [](W& w) { w.verdict = kLastVerdict; });
  bad("unknown verdict", [](W& w) { w.verdict = kLastVerdict + 1; });
  bad("unknown verdict", [](W& w) { w.verdict = 0x100; });
  bad("reserved bytes used", [](W& w) { w.zero = 0x80000000; });
}

TEST(LineWord, RefusesEveryFieldOutOfBounds) {
  const auto bad = [](const char* why, auto change) {
    refused<WordMessage>(kSomeWord, why, change);
  };
  using W = WordWire;
  bad("unknown word", [](W& w) { w.word = 0; });
  bad("unknown word", [](W& w) { w.word = kLastWord + 1; });
  bad("unknown word", [](W& w) { w.word = 0x102; });
  bad("reserved bytes used", [](W& w) { w.zero[0] = 1; });
  bad("reserved bytes used", [](W& w) { w.zero[2] = 0x100; });
  bad("value beyond the end of numbers", [](W& w) { w.value = uint64_t{1} << 62; });
  bad("value beyond the end of numbers", [](W& w) { w.value = UINT64_MAX; });
}

TEST(LineWord, CarriesAValueOnlyWhereItsWordHasOne) {
  constexpr uint64_t kMost = (uint64_t{1} << 62) - 1;
  for (uint16_t i = 1; i <= kLastWord; ++i) {
    const Word word = static_cast<Word>(i);
    const bool has =
        word == Word::kStart || word == Word::kFrozen || word == Word::kEnd || word == Word::kEndOk;
    EXPECT_TRUE(back(WordMessage{.word = word})) << i;
    EXPECT_EQ(bool(back(WordMessage{.word = word, .value = 1})), has) << i;
    EXPECT_EQ(bool(back(WordMessage{.word = word, .value = kMost})), has) << i;
  }
}

}  // namespace
}  // namespace rsock::wire
