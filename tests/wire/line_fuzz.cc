// Every decoder of the line on any bytes: no over-read, no crash; what is accepted is within bounds
// and is the same again after another trip through the encoder.

#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/wire/line.h"

using namespace rsock::wire;

namespace {

template <typename Message, size_t kSize>
void check(const Checked<Message>& m, LineType type, const uint8_t* data) {
  if (!m) return;
  uint8_t again[kSize];
  encode(*m, again);
  if (std::memcmp(again, data, kSize) != 0) abort();
  const auto head = decode_line_head(data, sizeof(HeaderWire));
  if (!head || head->type != type || head->size != kSize) abort();
}

void run(const uint8_t* data, size_t n) {
  const auto head = decode_line_head(data, n);
  if (head && (head->size == 0 || head->size > kLongestLineMessage)) abort();
  check<Greeting, kGreetingSize>(decode_greeting(data, n), LineType::kGreeting, data);
  check<Proof, kProofSize>(decode_proof(data, n), LineType::kProof, data);
  const auto want = decode_want(data, n);
  check<Want, kWantSize>(want, LineType::kWant, data);
  if (want && (!valid_ring_size(want->ring_size) || want->tuple.is_to_itself())) abort();
  check<Offer, kOfferSize>(decode_offer(data, n), LineType::kOffer, data);
  const auto word = decode_word(data, n);
  check<WordMessage, kWordSize>(word, LineType::kWord, data);
  if (word && (word->word < Word::kReady || word->word > Word::kBye || word->value >> 62 != 0)) {
    abort();
  }
}

/// Most random input dies at the magic. Mutate a good message as well: each input byte pair is a
/// place and a value.
template <size_t kSize, typename Message>
void mutate(const Message& m, const uint8_t* data, size_t size) {
  std::vector<uint8_t> good(kSize);
  encode(m, good.data());
  for (size_t i = 0; i + 1 < size; i += 2) good[data[i] % kSize] = data[i + 1];
  run(good.data(), good.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run(data, size);
  Want want;
  want.ring_size = 1 << 20;
  want.tuple.local.port = want.tuple.remote.port = 1;
  want.tuple.local.address[0] = want.tuple.remote.address[0] = 0x20;
  want.tuple.remote.address[15] = 1;
  mutate<kGreetingSize>(Greeting{}, data, size);
  mutate<kProofSize>(Proof{}, data, size);
  mutate<kWantSize>(want, data, size);
  mutate<kOfferSize>(Offer{.rdma_port = 1}, data, size);
  mutate<kWordSize>(WordMessage{.word = Word::kStart}, data, size);
  return 0;
}
