// Every rendezvous decoder on any bytes: no over-read, no crash; what is accepted is within bounds
// and is the same again after another trip through the encoder.

#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/wire/rendezvous.h"

using namespace rsock::wire;

namespace {

template <typename Message, size_t kSize>
void check(const rsock::wire::Checked<Message>& m, const uint8_t* data) {
  if (!m) return;
  uint8_t again[kSize];
  encode(*m, again);
  if (std::memcmp(again, data, kSize) != 0) abort();
}

void run(const uint8_t* data, size_t n) {
  const auto hello = decode_hello(data, n);
  check<Hello, kHelloSize>(hello, data);
  if (hello) {
    if (!valid_ring_size(hello->ring_size) || hello->keeper.size > SocketName::kMax) abort();
    sockaddr_un un;
    if (to_sockaddr(rendezvous_name(hello->tuple, hello->nonce), &un) > sizeof(un)) abort();
  }
  check<Welcome, kWelcomeSize>(decode_welcome(data, n), data);
  check<Confirm, kConfirmSize>(decode_confirm(data, n), data);
  check<Kick, kKickSize>(decode_kick(data, n), data);
  check<Where, kWhereSize>(decode_where(data, n), data);
  const auto here = decode_here(data, n);
  check<Here, kHereSize>(here, data);
  if (here && (here->verdict == Verdict::kOk) != (here->line_port != 0)) abort();
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
  Hello hello;
  hello.nonce = 1;
  hello.ring_size = 1 << 20;
  hello.tuple.local.port = 1;
  hello.tuple.remote.port = 2;
  hello.keeper = keeper_name(1, 2);
  mutate<kHelloSize>(hello, data, size);
  mutate<kHereSize>(Here{.line_port = 1}, data, size);
  return 0;
}
