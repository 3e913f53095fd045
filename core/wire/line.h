// The messages between two keepers on different hosts: the line, a TCP connection of their own.
//
// Purpose: a queue pair takes its control words with it when it fails. So they never travel on it:
// the control words of all streams that two processes share go over one TCP connection between
// their keepers, in order, as long as both live. Pure encoding and decoding; PROTOCOL.md, "Across
// hosts", explains the exchange. Layout: little-endian, fixed size, HeaderWire first (rendezvous.h,
// another magic); unused bytes are zero. Thread safety: pure functions. Trust: the decoders take
// any bytes, refuse what they do not know, and look at nothing beyond `n`.
//
//   line = GREETING both ways; PROOF both ways; then any of
//          WANT (caller) OFFER (callee)     : a channel for one stream; its queue pair follows by
//          the connection manager WORD (either)                    : a control word of a channel
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/wire/four_tuple.h"
#include "core/wire/refusal.h"
#include "core/wire/rendezvous.h"

namespace rsock::wire {

inline constexpr uint32_t kLineMagic = 0x4e4c4b52;  // "RKLN", little-endian

enum class LineType : uint16_t { kGreeting = 1, kProof = 2, kWant = 3, kOffer = 4, kWord = 5 };

using Mac = std::array<uint8_t, 32>;  // HMAC-SHA256

/// First message of each end.
struct Greeting {
  uint16_t version_min = kProtocolVersion;
  uint16_t version_max = kProtocolVersion;
  bool keyed = false;  // this end has a shared key, and demands a proof
  uint64_t keeper =
      0;  // random name of the process's keeper; two lines between the same two are one too many
  uint64_t challenge = 0;  // random; the other end's proof covers it
};

/// Second message of each end: HMAC over both greetings (mac.h), zeros without a key.
struct Proof {
  Mac mac{};
};

/// The caller (who called connect()) asks for a channel.
struct Want {
  uint64_t nonce = 0;      // random; names the channel in everything that follows
  uint32_t ring_size = 0;  // of each direction; a power of two, as in HELLO
  FourTuple tuple{};       // as the caller sees it
};

struct Offer {
  uint64_t nonce = 0;
  Verdict verdict = Verdict::kOk;
  uint16_t rdma_port = 0;  // where the callee's keeper listens in RDMA_PS_TCP; 0 when refused
};

/// What one end tells the other about a direction. "My" is the teller's.
enum class Word : uint16_t {
  kReady = 1,   // receiver: no reader of mine can miss the switch. value 0
  kStart = 2,   // sender: I go on in the ring from stream offset `value`
  kFrozen = 3,  // receiver: sealed; I consumed exactly `value` bytes of the channel
  kRecall = 4,  // sender: seal what I send, tell me where. value 0
  kEnd = 5,     // sender: my last byte is before channel offset `value`
  kEndOk =
      6,  // receiver: I have all bytes before your end, and will not seal. `value`: the same offset
  kReplayed = 7,  // sender: what was sealed off (or never began) is in the TCP stream. value 0
  kBye = 8,       // either: I have let go of the channel; nothing follows. value 0
};
inline constexpr uint16_t kLastWord = 8;

struct WordMessage {
  uint64_t nonce = 0;
  Word word{};
  uint64_t value = 0;  // < 2^62
};

struct GreetingWire {
  HeaderWire header;
  uint16_t version_min;
  uint16_t version_max;
  uint16_t keyed;
  uint16_t zero;
  uint64_t keeper;
  uint64_t challenge;
};
struct ProofWire {
  HeaderWire header;
  uint8_t mac[32];
};
struct WantWire {
  HeaderWire header;
  uint64_t nonce;
  uint8_t caller_address[16];
  uint8_t callee_address[16];
  uint16_t caller_port;
  uint16_t callee_port;
  uint32_t ring_size;
};
struct OfferWire {
  HeaderWire header;
  uint64_t nonce;
  uint16_t verdict;
  uint16_t rdma_port;
  uint32_t zero;
};
struct WordWire {
  HeaderWire header;
  uint64_t nonce;
  uint16_t word;
  uint16_t zero[3];
  uint64_t value;
};
static_assert(sizeof(GreetingWire) == 32 && sizeof(ProofWire) == 40 && sizeof(WantWire) == 56);
static_assert(sizeof(OfferWire) == 24 && sizeof(WordWire) == 32);

inline constexpr size_t kGreetingSize = sizeof(GreetingWire);
inline constexpr size_t kProofSize = sizeof(ProofWire);
inline constexpr size_t kWantSize = sizeof(WantWire);
inline constexpr size_t kOfferSize = sizeof(OfferWire);
inline constexpr size_t kWordSize = sizeof(WordWire);
inline constexpr size_t kLongestLineMessage = kWantSize;

void encode(const Greeting& m, uint8_t out[kGreetingSize]);
void encode(const Proof& m, uint8_t out[kProofSize]);
void encode(const Want& m, uint8_t out[kWantSize]);
void encode(const Offer& m, uint8_t out[kOfferSize]);
void encode(const WordMessage& m, uint8_t out[kWordSize]);

/// What the next bytes of the line are: the type and the size of the message that begins at
/// data[0], as soon as n >= sizeof(HeaderWire). Refused: another magic, an unknown type, a length
/// that is not the type's.
struct LineHead {
  LineType type{};
  size_t size = 0;
};
Checked<LineHead> decode_line_head(const uint8_t* data, size_t n);

Checked<Greeting> decode_greeting(const uint8_t* data, size_t n);
Checked<Proof> decode_proof(const uint8_t* data, size_t n);
/// The tuple is of one family, not to itself, ports are not 0; scope is 0 (link-local connections
/// are not lifted across hosts). ring_size is valid_ring_size().
Checked<Want> decode_want(const uint8_t* data, size_t n);
Checked<Offer> decode_offer(const uint8_t* data, size_t n);
Checked<WordMessage> decode_word(const uint8_t* data, size_t n);

}  // namespace rsock::wire
