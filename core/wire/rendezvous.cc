#include "core/wire/rendezvous.h"

#include <cerrno>
#include <cstring>

#include "core/base/check.h"
#include "core/wire/codec.h"
#include "core/wire/mac.h"

namespace rsock::wire {
namespace {

using codec::put;

HeaderWire header(MessageType type, size_t length) {
  return codec::header(kRendezvousMagic, type, length);
}

template <typename Wire>
const char* take(const uint8_t* data, size_t n, MessageType type, Wire* out) {
  return codec::take(data, n, kRendezvousMagic, type, out);
}

KeeperNameWire pack(const SocketName& name) {
  RSOCK_CHECK(name.size <= kKeeperNameMax);
  KeeperNameWire w{};
  w.size = name.size;
  std::memcpy(w.text, name.text, name.size);
  return w;
}

/// A keeper's name: the prefix, at least one byte after it, zeros behind. May be empty if allowed.
const char* unpack(const KeeperNameWire& w, bool may_be_empty, SocketName* out) {
  if (w.size > kKeeperNameMax) return "keeper name too long";
  if (!codec::all_zero(w.text + w.size, kKeeperNameMax - w.size)) {
    return "bytes behind the keeper name";
  }
  if (w.size == 0) return may_be_empty ? nullptr : "no keeper name";
  constexpr size_t kPrefix = sizeof(kKeeperPrefix) - 1;
  if (w.size <= kPrefix || std::memcmp(w.text, kKeeperPrefix, kPrefix) != 0) {
    return "keeper name without its prefix";
  }
  out->size = w.size;
  std::memcpy(out->text, w.text, w.size);
  return nullptr;
}

void append(SocketName* name, const char* text, size_t n) {
  RSOCK_CHECK(name->size + n <= SocketName::kMax);
  std::memcpy(name->text + name->size, text, n);
  name->size = static_cast<uint8_t>(name->size + n);
}

void append_hex(SocketName* name, const uint8_t* bytes, size_t n) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (size_t i = 0; i < n; ++i) {
    const char two[2] = {kDigits[bytes[i] >> 4], kDigits[bytes[i] & 15]};
    append(name, two, 2);
  }
}

/// The highest digit first.
template <typename T>
void append_hex(SocketName* name, T value) {
  uint8_t bytes[sizeof(T)];
  for (size_t i = 0; i < sizeof(T); ++i) {
    bytes[i] = static_cast<uint8_t>(value >> (8 * (sizeof(T) - 1 - i)));
  }
  append_hex(name, bytes, sizeof(bytes));
}

}  // namespace

SocketName rendezvous_name(const FourTuple& tuple, uint64_t netns_cookie) {
  const Endpoint& caller = tuple.is_caller() ? tuple.local : tuple.remote;
  const Endpoint& callee = tuple.is_caller() ? tuple.remote : tuple.local;
  SocketName name;
  append(&name, kNamePrefix, sizeof(kNamePrefix) - 1);
  append(&name, tuple.is_v4() ? "4" : "6", 1);
  const size_t skip = tuple.is_v4() ? 12 : 0;
  for (const Endpoint* e : {&caller, &callee}) {
    append_hex(&name, e->address.data() + skip, e->address.size() - skip);
    append_hex(&name, e->port);
  }
  append_hex(&name, tuple.scope);
  append_hex(&name, netns_cookie);
  return name;
}

SocketName keeper_name(uint64_t random_high, uint64_t random_low) {
  SocketName name;
  append(&name, kKeeperPrefix, sizeof(kKeeperPrefix) - 1);
  append_hex(&name, random_high);
  append_hex(&name, random_low);
  return name;
}

SocketName lane_name(uint64_t nonce, int direction) {
  constexpr char kLanePrefix[] = "rsock1/p/";
  uint8_t key[sizeof(nonce)];
  std::memcpy(key, &nonce, sizeof(key));
  const uint8_t which = static_cast<uint8_t>(direction);
  const Mac mac = hmac_sha256(key, {&which, 1});  // the name is public: it must not tell the nonce
  SocketName name;
  append(&name, kLanePrefix, sizeof(kLanePrefix) - 1);
  append_hex(&name, mac.data(), 16);
  return name;
}

socklen_t to_sockaddr(const SocketName& name, sockaddr_un* out) {
  *out = sockaddr_un{};
  out->sun_family = AF_UNIX;
  std::memcpy(out->sun_path + 1, name.text, name.size);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size);
}

void encode(const Hello& m, uint8_t out[kHelloSize]) {
  HelloWire w{};
  w.header = header(MessageType::kHello, sizeof(w));
  w.version_min = m.version_min;
  w.version_max = m.version_max;
  w.ring_size = m.ring_size;
  w.nonce = m.nonce;
  w.socket_cookie = m.socket_cookie;
  codec::pack(m.tuple, &w);
  w.scope = m.tuple.scope;
  w.keeper = pack(m.keeper);
  put(w, out);
}

void encode(const Welcome& m, uint8_t out[kWelcomeSize]) {
  WelcomeWire w{};
  w.header = header(MessageType::kWelcome, sizeof(w));
  w.version = m.version;
  w.verdict = static_cast<uint16_t>(m.verdict);
  w.nonce = m.nonce;
  w.socket_cookie = m.socket_cookie;
  w.keeper = pack(m.keeper);
  put(w, out);
}

void encode(const Confirm& m, uint8_t out[kConfirmSize]) {
  ConfirmWire w{};
  w.header = header(MessageType::kConfirm, sizeof(w));
  w.version = kProtocolVersion;
  w.verdict = static_cast<uint16_t>(m.verdict);
  w.nonce = m.nonce;
  put(w, out);
}

void encode(const Kick& m, uint8_t out[kKickSize]) {
  KickWire w{};
  w.header = header(MessageType::kKick, sizeof(w));
  w.version = kProtocolVersion;
  w.nonce = m.nonce;
  w.lane = m.lane;
  put(w, out);
}

void encode(const Where& m, uint8_t out[kWhereSize]) {
  WhereWire w{};
  w.header = header(MessageType::kWhere, sizeof(w));
  w.version = kProtocolVersion;
  w.nonce = m.nonce;
  put(w, out);
}

void encode(const Here& m, uint8_t out[kHereSize]) {
  HereWire w{};
  w.header = header(MessageType::kHere, sizeof(w));
  w.version = kProtocolVersion;
  w.verdict = static_cast<uint16_t>(m.verdict);
  w.line_port = m.line_port;
  w.nonce = m.nonce;
  w.keeper = m.keeper;
  put(w, out);
}

Checked<Hello> decode_hello(const uint8_t* data, size_t n) {
  HelloWire w;
  if (const char* why = take(data, n, MessageType::kHello, &w)) return refuse(EPROTO, why);
  if (w.version_min > w.version_max) return refuse(EPROTO, "version range upside down");
  if (w.version_min > kProtocolVersion || w.version_max < kProtocolVersion) {
    return refuse(EPROTONOSUPPORT, "no version in common");
  }
  Hello m;
  m.version_min = w.version_min;
  m.version_max = w.version_max;
  m.nonce = w.nonce;
  m.socket_cookie = w.socket_cookie;
  if (!valid_ring_size(w.ring_size)) return refuse(EPROTO, "ring size out of range");
  m.ring_size = w.ring_size;
  m.tuple = codec::unpack(w);
  m.tuple.scope = w.scope;
  if (const char* why = codec::impossible(m.tuple)) return refuse(EPROTO, why);
  if (!m.tuple.is_caller()) return refuse(EPROTO, "the wrong end calls");
  if (const char* why = unpack(w.keeper, false, &m.keeper)) return refuse(EPROTO, why);
  return m;
}

Checked<Welcome> decode_welcome(const uint8_t* data, size_t n) {
  WelcomeWire w;
  if (const char* why = take(data, n, MessageType::kWelcome, &w)) return refuse(EPROTO, why);
  if (w.version != kProtocolVersion) return refuse(EPROTONOSUPPORT, "version not offered");
  if (w.verdict > kLastVerdict) return refuse(EPROTO, "unknown verdict");
  if (w.zero != 0) return refuse(EPROTO, "reserved bytes used");
  Welcome m;
  m.version = w.version;
  m.verdict = static_cast<Verdict>(w.verdict);
  m.nonce = w.nonce;
  m.socket_cookie = w.socket_cookie;
  if (const char* why = unpack(w.keeper, m.verdict != Verdict::kOk, &m.keeper)) {
    return refuse(EPROTO, why);
  }
  return m;
}

Checked<Confirm> decode_confirm(const uint8_t* data, size_t n) {
  ConfirmWire w;
  if (const char* why = take(data, n, MessageType::kConfirm, &w)) return refuse(EPROTO, why);
  if (w.version != kProtocolVersion) return refuse(EPROTONOSUPPORT, "version not agreed");
  if (w.verdict > kLastVerdict) return refuse(EPROTO, "unknown verdict");
  if (w.zero != 0) return refuse(EPROTO, "reserved bytes used");
  return Confirm{static_cast<Verdict>(w.verdict), w.nonce};
}

Checked<Kick> decode_kick(const uint8_t* data, size_t n) {
  KickWire w;
  if (const char* why = take(data, n, MessageType::kKick, &w)) return refuse(EPROTO, why);
  if (w.version != kProtocolVersion) return refuse(EPROTONOSUPPORT, "version not agreed");
  if (!codec::all_zero(w.zero, sizeof(w.zero))) return refuse(EPROTO, "reserved bytes used");
  if (w.lane > 2) return refuse(EPROTO, "no such direction");
  return Kick{w.nonce, w.lane};
}

Checked<Where> decode_where(const uint8_t* data, size_t n) {
  WhereWire w;
  if (const char* why = take(data, n, MessageType::kWhere, &w)) return refuse(EPROTO, why);
  if (w.version != kProtocolVersion) return refuse(EPROTONOSUPPORT, "version not spoken");
  if (!codec::all_zero(w.zero, sizeof(w.zero))) return refuse(EPROTO, "reserved bytes used");
  return Where{w.nonce};
}

Checked<Here> decode_here(const uint8_t* data, size_t n) {
  HereWire w;
  if (const char* why = take(data, n, MessageType::kHere, &w)) return refuse(EPROTO, why);
  if (w.version != kProtocolVersion) return refuse(EPROTONOSUPPORT, "version not spoken");
  if (const char* why = codec::impossible_answer(w.verdict, w.line_port)) {
    return refuse(EPROTO, why);
  }
  if (w.zero != 0) return refuse(EPROTO, "reserved bytes used");
  return Here{static_cast<Verdict>(w.verdict), w.line_port, w.nonce, w.keeper};
}

}  // namespace rsock::wire
