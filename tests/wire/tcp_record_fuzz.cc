// The record decoder on any bytes: the same events however the input is cut, no over-read, and an
// end to every loop.

#include <cstdlib>
#include <string>
#include <vector>

#include "core/wire/tcp_record.h"

using namespace rsock::wire;

namespace {

/// The first input byte says how the rest is cut. Events as text, data glued together.
std::string decode(const uint8_t* data, size_t n, size_t step) {
  RecordDecoder d;
  std::string said;
  for (size_t at = 0; at < n;) {
    const size_t len = step < n - at ? step : n - at;
    const std::vector<uint8_t> piece(data + at, data + at + len);  // ASan guards its end
    for (size_t p = 0; p < len;) {
      const auto e = d.next(piece.data() + p, len - p);
      if (e.used > len - p) abort();
      if (e.kind == RecordDecoder::Kind::kBroken) return said + "!" + e.reason;
      if (e.used == 0) abort();
      if (e.kind == RecordDecoder::Kind::kRecord) {
        uint8_t again[kRecordSize];
        encode(e.record, again);  // checks what it is given
        said += "#" + std::to_string(e.record.offset) + "/" + std::to_string(e.record.length);
      }
      said.append(e.bytes.begin(), e.bytes.end());
      p += e.used;
    }
    at += len;
  }
  return said;
}

std::vector<uint8_t> with_headers(const uint8_t* data, size_t size) {
  std::vector<uint8_t> out;
  for (size_t i = 0; i + 2 < size; i += 3) {
    Record r;
    r.type = static_cast<RecordType>(1 + data[i] % 4);
    r.generation = data[i];
    r.offset = data[i + 1];
    r.length = r.type == RecordType::kData ? 1 + data[i + 2] % 60u : 0;
    uint8_t header[kRecordSize];
    encode(r, header);
    if (data[i] > 250) header[data[i + 1] % kRecordSize] ^= data[i + 2];
    out.insert(out.end(), header, header + kRecordSize);
    out.insert(out.end(), r.length, data[i]);
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t step = 1 + data[0] % 64;
  if (decode(data + 1, size - 1, step) != decode(data + 1, size - 1, SIZE_MAX)) abort();
  const auto stream = with_headers(data + 1, size - 1);
  if (decode(stream.data(), stream.size(), step) !=
      decode(stream.data(), stream.size(), SIZE_MAX)) {
    abort();
  }
  return 0;
}
