// Every decoder of private data on any bytes: no over-read, no crash; what is accepted is within
// bounds and is the same again after another trip through the encoder, zeros behind it included.

#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/wire/cm_data.h"

using namespace rsock::wire;

namespace {

template <typename Message>
void check(const Checked<Message>& m, const uint8_t* data, size_t n) {
  if (!m) return;
  std::vector<uint8_t> again(n);
  encode(*m, again.data());
  if (std::memcmp(again.data(), data, n) != 0) abort();
}

void run(const uint8_t* data, size_t n) {
  const auto type = decode_cm_type(data, n);
  const auto find = decode_find(data, n);
  check(find, data, n);
  if (find && (!type || *type != CmType::kFind || find->tuple.is_to_itself())) abort();
  const auto found = decode_found(data, n);
  check(found, data, n);
  if (found && (type || (found->verdict == Verdict::kOk) != (found->line_port != 0))) abort();
  const auto join = decode_join(data, n);
  check(join, data, n);
  if (join && (!type || *type != CmType::kJoin || !valid_ring_size(join->ring_size))) abort();
  if (join && join->ring_address + join->ring_size < join->ring_address) abort();
}

/// Most random input dies at the magic. Mutate a good message as well: each input byte pair is a
/// place and a value.
template <size_t kSize, typename Message>
void mutate(const Message& m, const uint8_t* data, size_t size) {
  constexpr size_t kPadded = kSize + 8;
  std::vector<uint8_t> good(kPadded);
  encode(m, good.data());
  for (size_t i = 0; i + 1 < size; i += 2) good[data[i] % kPadded] = data[i + 1];
  run(good.data(), good.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run(data, size);
  Find find;
  find.tuple.local.port = find.tuple.remote.port = 1;
  find.tuple.local.address[0] = find.tuple.remote.address[0] = 0x20;
  find.tuple.remote.address[15] = 1;
  mutate<kFindSize>(find, data, size);
  mutate<kFoundSize>(Found{.line_port = 1}, data, size);
  mutate<kJoinSize>(Join{.ring_size = 1 << 20}, data, size);
  return 0;
}
