// The private data of the RDMA connection manager: how a keeper on another host is found, and how
// the two ends of a queue pair tell each other where their rings are.
//
// Purpose: pure encoding and decoding. The caller asks the listening address in the RDMA port space
// (FIND); whoever holds that port answers by a rejection that names the keeper that owns the
// connection (FOUND). Later the caller connects a queue pair to that keeper's own port (JOIN in the
// request, JOIN in the reply). Layout: little-endian, fixed size. The kernel hands out private data
// padded with zeros to the transport's maximum (56 bytes of a request, 196 of a reply, 148 of a
// rejection over InfiniBand and RoCE; ib_cm.h, rdma_connect(3)), so decoders take n >= their size
// and demand zeros behind. Trust: any bytes, as rendezvous.h. Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/wire/four_tuple.h"
#include "core/wire/refusal.h"
#include "core/wire/rendezvous.h"

namespace rsock::wire {

inline constexpr uint32_t kCmMagic = 0x4d434b52;  // "RKCM", little-endian

enum class CmType : uint8_t { kFind = 1, kFound = 2, kJoin = 3 };

/// "Who holds the other end of this connection?" As the caller sees it. A connection manager
/// request.
struct Find {
  uint64_t nonce = 0;
  FourTuple tuple{};
};

/// The answer, in a rejection.
struct Found {
  uint64_t nonce = 0;  // FIND's
  Verdict verdict = Verdict::kOk;
  uint16_t line_port =
      0;  // TCP port of the owner's keeper, on the address that FIND was sent to; 0 when refused
  uint64_t keeper = 0;  // its name, as in GREETING
};

/// Beside a queue pair, either way: where the peer may write.
struct Join {
  uint64_t nonce = 0;         // WANT's
  uint64_t ring_address = 0;  // of the teller's receive ring, in its registered memory
  uint32_t ring_key = 0;      // its remote key
  uint32_t ring_size = 0;     // a power of two
  uint64_t mac = 0;           // first 8 bytes of an HMAC (mac.h) over the rest; 0 without a key
};

struct FindWire {
  uint32_t magic;
  uint8_t version;
  uint8_t type;
  uint16_t caller_port;
  uint16_t callee_port;
  uint8_t caller_address[16];
  uint8_t callee_address[16];
  uint8_t nonce[8];
  uint8_t zero[6];
} __attribute__((packed));
struct FoundWire {
  uint32_t magic;
  uint8_t version;
  uint8_t type;
  uint16_t verdict;
  uint64_t nonce;
  uint64_t keeper;
  uint16_t line_port;
  uint16_t zero[3];
};
struct JoinWire {
  uint32_t magic;
  uint8_t version;
  uint8_t type;
  uint16_t zero;
  uint64_t nonce;
  uint64_t ring_address;
  uint32_t ring_key;
  uint32_t ring_size;
  uint64_t mac;
  uint64_t zero2;
};
static_assert(sizeof(FindWire) == 56 && sizeof(FoundWire) == 32 && sizeof(JoinWire) == 48);

inline constexpr size_t kFindSize = sizeof(FindWire);
inline constexpr size_t kFoundSize = sizeof(FoundWire);
inline constexpr size_t kJoinSize = sizeof(JoinWire);

void encode(const Find& m, uint8_t out[kFindSize]);
void encode(const Found& m, uint8_t out[kFoundSize]);
void encode(const Join& m, uint8_t out[kJoinSize]);

/// Which of the two a connection request carries. Refused: neither.
Checked<CmType> decode_cm_type(const uint8_t* data, size_t n);
/// As decode_want(). version must be kProtocolVersion: EPROTONOSUPPORT else.
Checked<Find> decode_find(const uint8_t* data, size_t n);
Checked<Found> decode_found(const uint8_t* data, size_t n);
/// ring_size is valid_ring_size(), address + size does not wrap.
Checked<Join> decode_join(const uint8_t* data, size_t n);

}  // namespace rsock::wire
