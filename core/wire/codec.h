// What the encoders and decoders of this room share; nobody else includes it.
//
// Purpose: messages that begin with a HeaderWire, and the two ends of a connection as messages
// spell them. Checks return nullptr, or why not, as a literal. Thread safety: pure functions.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/wire/four_tuple.h"
#include "core/wire/rendezvous.h"

namespace rsock::wire::codec {

static_assert(std::endian::native == std::endian::little, "the wire structs are the bytes");

template <typename Type>
HeaderWire header(uint32_t magic, Type type, size_t length) {
  return HeaderWire{magic, static_cast<uint16_t>(length), static_cast<uint16_t>(type)};
}

template <typename Wire>
void put(const Wire& w, uint8_t* out) {
  std::memcpy(out, &w, sizeof(w));
}

/// Takes the bytes if they are one message of that type, and nothing else.
template <typename Wire, typename Type>
const char* take(const uint8_t* data, size_t n, uint32_t magic, Type type, Wire* out) {
  if (n != sizeof(Wire)) return "message of the wrong size";
  std::memcpy(out, data, sizeof(Wire));
  if (out->header.magic != magic) return "message magic";
  if (out->header.type != static_cast<uint16_t>(type)) return "message type";
  if (out->header.length != sizeof(Wire)) return "message length";
  return nullptr;
}

inline bool all_zero(const void* bytes, size_t n) {
  const auto* b = static_cast<const uint8_t*>(bytes);
  return std::all_of(b, b + n, [](uint8_t x) { return x == 0; });
}

/// Into and out of a message with caller_address, callee_address, caller_port and callee_port.
/// Member by member: FindWire is packed, so nothing may refer to its ports.
template <typename Wire>
void pack(const FourTuple& t, Wire* w) {
  std::copy(t.local.address.begin(), t.local.address.end(), w->caller_address);
  std::copy(t.remote.address.begin(), t.remote.address.end(), w->callee_address);
  w->caller_port = t.local.port;
  w->callee_port = t.remote.port;
}

template <typename Wire>
FourTuple unpack(const Wire& w) {
  FourTuple t;
  std::copy_n(w.caller_address, 16, t.local.address.begin());
  std::copy_n(w.callee_address, 16, t.remote.address.begin());
  t.local.port = w.caller_port;
  t.remote.port = w.callee_port;
  return t;
}

/// What no connection is.
inline const char* impossible(const FourTuple& t) {
  if (t.local.port == 0 || t.remote.port == 0) return "port 0";
  if (t.mixed_families()) return "ends of two families";
  return nullptr;
}

/// The same for a connection that is said to lead from one host to another, or to the same one by
/// the device's loopback.
const char* impossible_across_hosts(const FourTuple& t);

/// A port to go to stands there if, and only if, the verdict is ok.
inline const char* impossible_answer(uint16_t verdict, uint16_t port) {
  if (verdict > kLastVerdict) return "unknown verdict";
  const bool ok = verdict == static_cast<uint16_t>(Verdict::kOk);
  if (ok && port == 0) return "agreed without a port";
  if (!ok && port != 0) return "a port in a refusal";
  return nullptr;
}

}  // namespace rsock::wire::codec
