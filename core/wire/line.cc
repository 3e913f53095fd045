#include "core/wire/line.h"

#include <cerrno>

#include "core/wire/codec.h"
#include "core/wire/control_page.h"

namespace rsock::wire {
namespace {

using codec::put;

HeaderWire header(LineType type, size_t length) { return codec::header(kLineMagic, type, length); }

template <typename Wire>
const char* take(const uint8_t* data, size_t n, LineType type, Wire* out) {
  return codec::take(data, n, kLineMagic, type, out);
}

size_t size_of(uint16_t type) {
  switch (static_cast<LineType>(type)) {
    case LineType::kGreeting:
      return kGreetingSize;
    case LineType::kProof:
      return kProofSize;
    case LineType::kWant:
      return kWantSize;
    case LineType::kOffer:
      return kOfferSize;
    case LineType::kWord:
      return kWordSize;
  }
  return 0;
}

bool has_value(Word word) {
  return word == Word::kStart || word == Word::kFrozen || word == Word::kEnd ||
         word == Word::kEndOk;
}

}  // namespace

void encode(const Greeting& m, uint8_t out[kGreetingSize]) {
  GreetingWire w{};
  w.header = header(LineType::kGreeting, sizeof(w));
  w.version_min = m.version_min;
  w.version_max = m.version_max;
  w.keyed = m.keyed ? 1 : 0;
  w.keeper = m.keeper;
  w.challenge = m.challenge;
  put(w, out);
}

void encode(const Proof& m, uint8_t out[kProofSize]) {
  ProofWire w{};
  w.header = header(LineType::kProof, sizeof(w));
  std::copy(m.mac.begin(), m.mac.end(), w.mac);
  put(w, out);
}

void encode(const Want& m, uint8_t out[kWantSize]) {
  WantWire w{};
  w.header = header(LineType::kWant, sizeof(w));
  w.nonce = m.nonce;
  codec::pack(m.tuple, &w);
  w.ring_size = m.ring_size;
  put(w, out);
}

void encode(const Offer& m, uint8_t out[kOfferSize]) {
  OfferWire w{};
  w.header = header(LineType::kOffer, sizeof(w));
  w.nonce = m.nonce;
  w.verdict = static_cast<uint16_t>(m.verdict);
  w.rdma_port = m.rdma_port;
  put(w, out);
}

void encode(const WordMessage& m, uint8_t out[kWordSize]) {
  WordWire w{};
  w.header = header(LineType::kWord, sizeof(w));
  w.nonce = m.nonce;
  w.word = static_cast<uint16_t>(m.word);
  w.value = m.value;
  put(w, out);
}

Checked<LineHead> decode_line_head(const uint8_t* data, size_t n) {
  HeaderWire w;
  if (n < sizeof(w)) return refuse(EPROTO, "header incomplete");
  std::memcpy(&w, data, sizeof(w));
  if (w.magic != kLineMagic) return refuse(EPROTO, "message magic");
  const size_t size = size_of(w.type);
  if (size == 0) return refuse(EPROTO, "message type");
  if (w.length != size) return refuse(EPROTO, "message length");
  return LineHead{static_cast<LineType>(w.type), size};
}

Checked<Greeting> decode_greeting(const uint8_t* data, size_t n) {
  GreetingWire w;
  if (const char* why = take(data, n, LineType::kGreeting, &w)) return refuse(EPROTO, why);
  if (w.version_min > w.version_max) return refuse(EPROTO, "version range upside down");
  if (w.version_min > kProtocolVersion || w.version_max < kProtocolVersion) {
    return refuse(EPROTONOSUPPORT, "no version in common");
  }
  if (w.keyed > 1) return refuse(EPROTO, "keyed is neither 0 nor 1");
  if (w.zero != 0) return refuse(EPROTO, "reserved bytes used");
  Greeting m;
  m.version_min = w.version_min;
  m.version_max = w.version_max;
  m.keyed = w.keyed == 1;
  m.keeper = w.keeper;
  m.challenge = w.challenge;
  return m;
}

Checked<Proof> decode_proof(const uint8_t* data, size_t n) {
  ProofWire w;
  if (const char* why = take(data, n, LineType::kProof, &w)) return refuse(EPROTO, why);
  Proof m;
  std::copy(std::begin(w.mac), std::end(w.mac), m.mac.begin());
  return m;
}

Checked<Want> decode_want(const uint8_t* data, size_t n) {
  WantWire w;
  if (const char* why = take(data, n, LineType::kWant, &w)) return refuse(EPROTO, why);
  if (!valid_ring_size(w.ring_size)) return refuse(EPROTO, "ring size out of range");
  const Want m{.nonce = w.nonce, .ring_size = w.ring_size, .tuple = codec::unpack(w)};
  if (const char* why = codec::impossible_across_hosts(m.tuple)) return refuse(EPROTO, why);
  return m;
}

Checked<Offer> decode_offer(const uint8_t* data, size_t n) {
  OfferWire w;
  if (const char* why = take(data, n, LineType::kOffer, &w)) return refuse(EPROTO, why);
  if (const char* why = codec::impossible_answer(w.verdict, w.rdma_port)) {
    return refuse(EPROTO, why);
  }
  if (w.zero != 0) return refuse(EPROTO, "reserved bytes used");
  return Offer{w.nonce, static_cast<Verdict>(w.verdict), w.rdma_port};
}

Checked<WordMessage> decode_word(const uint8_t* data, size_t n) {
  WordWire w;
  if (const char* why = take(data, n, LineType::kWord, &w)) return refuse(EPROTO, why);
  if (w.word == 0 || w.word > kLastWord) return refuse(EPROTO, "unknown word");
  if (!codec::all_zero(w.zero, sizeof(w.zero))) return refuse(EPROTO, "reserved bytes used");
  const Word word = static_cast<Word>(w.word);
  if (w.value > kHeadCount) return refuse(EPROTO, "value beyond the end of numbers");
  if (w.value != 0 && !has_value(word)) return refuse(EPROTO, "value of a word that has none");
  return WordMessage{w.nonce, word, w.value};
}

}  // namespace rsock::wire
