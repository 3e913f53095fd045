#include "core/wire/cm_data.h"

#include <cerrno>

#include "core/wire/codec.h"

namespace rsock::wire {
namespace {

/// magic, version and type begin each of the three, at one place.
struct Begin {
  uint32_t magic;
  uint8_t version;
  uint8_t type;
};
constexpr size_t kBeginSize = offsetof(Begin, type) + 1;
static_assert(offsetof(FindWire, version) == offsetof(Begin, version));
static_assert(offsetof(FoundWire, version) == offsetof(Begin, version));
static_assert(offsetof(JoinWire, version) == offsetof(Begin, version));
static_assert(offsetof(FindWire, type) == offsetof(Begin, type));
static_assert(offsetof(FoundWire, type) == offsetof(Begin, type));
static_assert(offsetof(JoinWire, type) == offsetof(Begin, type));

template <typename Wire>
Wire begin(CmType type) {
  Wire w{};
  w.magic = kCmMagic;
  w.version = kProtocolVersion;
  w.type = static_cast<uint8_t>(type);
  return w;
}

template <typename Wire>
Checked<Wire> take(const uint8_t* data, size_t n, CmType type) {
  Wire w;
  if (n < sizeof(w)) return refuse(EPROTO, "private data too short");
  std::memcpy(&w, data, sizeof(w));
  if (w.magic != kCmMagic) return refuse(EPROTO, "private data magic");
  if (w.type != static_cast<uint8_t>(type)) return refuse(EPROTO, "private data type");
  // Before the padding: what another version has there is its own business.
  if (w.version != kProtocolVersion) return refuse(EPROTONOSUPPORT, "version not spoken");
  if (!codec::all_zero(data + sizeof(w), n - sizeof(w))) {
    return refuse(EPROTO, "bytes behind the private data");
  }
  return w;
}

}  // namespace

void encode(const Find& m, uint8_t out[kFindSize]) {
  auto w = begin<FindWire>(CmType::kFind);
  codec::pack(m.tuple, &w);
  std::memcpy(w.nonce, &m.nonce, sizeof(w.nonce));
  codec::put(w, out);
}

void encode(const Found& m, uint8_t out[kFoundSize]) {
  auto w = begin<FoundWire>(CmType::kFound);
  w.verdict = static_cast<uint16_t>(m.verdict);
  w.nonce = m.nonce;
  w.keeper = m.keeper;
  w.line_port = m.line_port;
  codec::put(w, out);
}

void encode(const Join& m, uint8_t out[kJoinSize]) {
  auto w = begin<JoinWire>(CmType::kJoin);
  w.nonce = m.nonce;
  w.ring_address = m.ring_address;
  w.ring_key = m.ring_key;
  w.ring_size = m.ring_size;
  w.mac = m.mac;
  codec::put(w, out);
}

Checked<CmType> decode_cm_type(const uint8_t* data, size_t n) {
  Begin w;
  if (n < kBeginSize) return refuse(EPROTO, "private data too short");
  std::memcpy(&w, data, kBeginSize);
  if (w.magic != kCmMagic) return refuse(EPROTO, "private data magic");
  const auto type = static_cast<CmType>(w.type);
  if (type != CmType::kFind && type != CmType::kJoin) return refuse(EPROTO, "private data type");
  return type;
}

Checked<Find> decode_find(const uint8_t* data, size_t n) {
  const auto w = take<FindWire>(data, n, CmType::kFind);
  if (!w) return tl::unexpected(w.error());
  if (!codec::all_zero(w->zero, sizeof(w->zero))) return refuse(EPROTO, "reserved bytes used");
  Find m;
  std::memcpy(&m.nonce, w->nonce, sizeof(m.nonce));
  m.tuple = codec::unpack(*w);
  if (const char* why = codec::impossible_across_hosts(m.tuple)) return refuse(EPROTO, why);
  return m;
}

Checked<Found> decode_found(const uint8_t* data, size_t n) {
  const auto w = take<FoundWire>(data, n, CmType::kFound);
  if (!w) return tl::unexpected(w.error());
  if (!codec::all_zero(w->zero, sizeof(w->zero))) return refuse(EPROTO, "reserved bytes used");
  if (const char* why = codec::impossible_answer(w->verdict, w->line_port)) {
    return refuse(EPROTO, why);
  }
  return Found{w->nonce, static_cast<Verdict>(w->verdict), w->line_port, w->keeper};
}

Checked<Join> decode_join(const uint8_t* data, size_t n) {
  const auto w = take<JoinWire>(data, n, CmType::kJoin);
  if (!w) return tl::unexpected(w.error());
  if (w->zero != 0 || w->zero2 != 0) return refuse(EPROTO, "reserved bytes used");
  if (!valid_ring_size(w->ring_size)) return refuse(EPROTO, "ring size out of range");
  if (w->ring_address > UINT64_MAX - w->ring_size) {
    return refuse(EPROTO, "ring beyond the end of memory");
  }
  return Join{w->nonce, w->ring_address, w->ring_key, w->ring_size, w->mac};
}

}  // namespace rsock::wire
