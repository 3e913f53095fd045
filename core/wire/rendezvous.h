// The messages by which two processes agree on a channel, and the name under which they meet.
//
// Purpose: pure encoding and decoding. HELLO (caller to callee, with the memfd beside it), WELCOME
// (callee to caller) and CONFIRM (caller to callee) travel on the abstract Unix stream socket named
// after the connection; KICK is a datagram between keepers. WHERE and HERE, on a connection of
// their own to the same name, ask which keeper holds that end. PROTOCOL.md explains the exchange.
// Layout: little-endian, fixed size, fixed by the static_asserts below; unused bytes are zero.
// Thread safety: pure functions.
// Trust: the decoders take any bytes. They look at nothing beyond `n`, refuse what they do not
// know, and what they return is within bounds. Whether the sender may speak for the connection is
// decided elsewhere: by socket cookies and credentials, compared with what the kernel reports.
// Versions: magic, length, type and the place of the version never change. Everything else may,
// under a new version number. HELLO offers a range, WELCOME picks.
#pragma once

#include <sys/un.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/wire/four_tuple.h"
#include "core/wire/refusal.h"

namespace rsock::wire {

inline constexpr uint16_t kProtocolVersion = 1;
inline constexpr uint32_t kRendezvousMagic = 0x4b534b52;  // "RKSK", little-endian

/// What a ring may measure, in bytes; always a power of two.
inline constexpr uint64_t kMinRingSize = 64 * 1024;
inline constexpr uint64_t kMaxRingSize = 64 * 1024 * 1024;
constexpr bool valid_ring_size(uint64_t n) {
  return n >= kMinRingSize && n <= kMaxRingSize && (n & (n - 1)) == 0;
}

enum class MessageType : uint16_t {
  kHello = 1,
  kWelcome = 2,
  kConfirm = 3,
  kKick = 4,
  kWhere = 5,
  kHere = 6
};

/// Every answer: whether the sender goes on, and if not, why. Numbers are for ever.
enum class Verdict : uint16_t {
  kOk = 0,
  kVersion = 1,      // no version in common
  kNotMine = 2,      // no stream of this process is that connection (or not any more)
  kCredentials = 3,  // the kernel says that the peer is not the other end
  kMemory = 4,       // the memfd or its mapping was refused
  kNotNow = 5,       // shared after fork, closing, or busy; try again later
  kNotAllowed = 6,   // configuration
  kLimit = 7,        // descriptors or memory at their limit
  kMalformed = 8,    // the message could not be decoded
};
inline constexpr uint16_t kLastVerdict = 8;

/// An abstract socket name (without the leading NUL that makes it abstract). A keeper's begins with
/// kKeeperPrefix: nobody can make us send a datagram to a stranger's socket.
struct SocketName {
  static constexpr size_t kMax = sizeof(sockaddr_un::sun_path) - 1;
  uint8_t size = 0;
  char text[kMax] = {};

  std::span<const char> view() const { return {text, size}; }
};
inline constexpr char kNamePrefix[] = "rsock1/";
inline constexpr char kKeeperPrefix[] = "rsock1/k/";
inline constexpr size_t kKeeperNameMax = 47;

/// The name under which the callee of a connection listens. Injective: the bytes of both ends in
/// fixed width, the caller's first, so that both compute the same and no two connections share one.
/// `netns_cookie` is SO_NETNS_COOKIE of the TCP socket, or 0 where the kernel has none.
SocketName rendezvous_name(const FourTuple& tuple, uint64_t netns_cookie);
/// The name of a keeper's datagram socket: not guessable if `random` is not.
SocketName keeper_name(uint64_t random_high, uint64_t random_low);
/// The name under which the sender of `direction` (0, 1) waits for its channel's page lane. Only who
/// knows the channel's nonce can compute it.
SocketName lane_name(uint64_t nonce, int direction);
/// Fills a sockaddr_un; returns the length for bind() and connect().
socklen_t to_sockaddr(const SocketName& name, sockaddr_un* out);

struct Hello {
  uint16_t version_min = kProtocolVersion;
  uint16_t version_max = kProtocolVersion;
  uint64_t nonce = 0;          // names the channel in kicks; random
  uint64_t socket_cookie = 0;  // SO_COOKIE of the caller's TCP socket; sock_diag shows it too
  uint32_t ring_size = 0;
  FourTuple tuple{};  // as the caller sees it
  SocketName keeper{};
};

struct Welcome {
  uint16_t version = kProtocolVersion;
  Verdict verdict = Verdict::kOk;
  uint64_t nonce = 0;          // HELLO's
  uint64_t socket_cookie = 0;  // SO_COOKIE of the callee's TCP socket; 0 when refused
  SocketName keeper{};         // empty when refused
};

struct Confirm {
  Verdict verdict = Verdict::kOk;
  uint64_t nonce = 0;
};

struct Kick {
  uint64_t nonce = 0;
  /// Not 0: the sender of direction lane - 1 waits at lane_name() for its page lane.
  uint16_t lane = 0;
};

/// Asked by the keeper to which a FIND came (cm_data.h): where does the other host reach you?
struct Where {
  uint64_t nonce = 0;  // FIND's
};

struct Here {
  Verdict verdict = Verdict::kOk;
  uint16_t line_port = 0;  // TCP port of the answering keeper; 0 when refused
  uint64_t nonce = 0;      // WHERE's
  uint64_t keeper = 0;     // its name, as in GREETING (line.h)
};

// --- layouts -----------------------------------------------------------------------------------

struct HeaderWire {
  uint32_t magic;
  uint16_t length;  // of the whole message
  uint16_t type;
};

struct KeeperNameWire {
  uint8_t size;
  char text[kKeeperNameMax];
};

struct HelloWire {
  HeaderWire header;
  uint16_t version_min;
  uint16_t version_max;
  uint32_t ring_size;
  uint64_t nonce;
  uint64_t socket_cookie;
  uint8_t caller_address[16];
  uint8_t callee_address[16];
  uint16_t caller_port;
  uint16_t callee_port;
  uint32_t scope;
  KeeperNameWire keeper;
};

struct WelcomeWire {
  HeaderWire header;
  uint16_t version;
  uint16_t verdict;
  uint32_t zero;
  uint64_t nonce;
  uint64_t socket_cookie;
  KeeperNameWire keeper;
};

struct ConfirmWire {
  HeaderWire header;
  uint16_t version;
  uint16_t verdict;
  uint32_t zero;
  uint64_t nonce;
};

struct KickWire {
  HeaderWire header;
  uint16_t version;
  uint16_t lane;
  uint16_t zero[2];
  uint64_t nonce;
};

struct WhereWire {
  HeaderWire header;
  uint16_t version;
  uint16_t zero[3];
  uint64_t nonce;
};

struct HereWire {
  HeaderWire header;
  uint16_t version;
  uint16_t verdict;
  uint16_t line_port;
  uint16_t zero;
  uint64_t nonce;
  uint64_t keeper;
};

static_assert(sizeof(HeaderWire) == 8 && sizeof(KeeperNameWire) == 48);
static_assert(offsetof(HelloWire, version_min) == 8 && offsetof(HelloWire, version_max) == 10);
static_assert(offsetof(HelloWire, ring_size) == 12 && offsetof(HelloWire, nonce) == 16);
static_assert(offsetof(HelloWire, socket_cookie) == 24);
static_assert(offsetof(HelloWire, caller_address) == 32);
static_assert(offsetof(HelloWire, callee_address) == 48);
static_assert(offsetof(HelloWire, caller_port) == 64 && offsetof(HelloWire, callee_port) == 66);
static_assert(offsetof(HelloWire, scope) == 68 && offsetof(HelloWire, keeper) == 72);
static_assert(sizeof(HelloWire) == 120);
static_assert(offsetof(WelcomeWire, version) == 8 && offsetof(WelcomeWire, verdict) == 10);
static_assert(offsetof(WelcomeWire, nonce) == 16 && offsetof(WelcomeWire, socket_cookie) == 24);
static_assert(offsetof(WelcomeWire, keeper) == 32 && sizeof(WelcomeWire) == 80);
static_assert(offsetof(ConfirmWire, version) == 8 && offsetof(ConfirmWire, verdict) == 10);
static_assert(offsetof(ConfirmWire, nonce) == 16 && sizeof(ConfirmWire) == 24);
static_assert(offsetof(KickWire, version) == 8 && offsetof(KickWire, lane) == 10 && offsetof(KickWire, nonce) == 16);
static_assert(sizeof(KickWire) == 24);
static_assert(offsetof(WhereWire, version) == 8 && offsetof(WhereWire, nonce) == 16);
static_assert(sizeof(WhereWire) == 24);
static_assert(offsetof(HereWire, version) == 8 && offsetof(HereWire, verdict) == 10);
static_assert(offsetof(HereWire, line_port) == 12 && offsetof(HereWire, nonce) == 16);
static_assert(offsetof(HereWire, keeper) == 24 && sizeof(HereWire) == 32);

inline constexpr size_t kHelloSize = sizeof(HelloWire);
inline constexpr size_t kWelcomeSize = sizeof(WelcomeWire);
inline constexpr size_t kConfirmSize = sizeof(ConfirmWire);
inline constexpr size_t kKickSize = sizeof(KickWire);
inline constexpr size_t kWhereSize = sizeof(WhereWire);
inline constexpr size_t kHereSize = sizeof(HereWire);

// --- codec -------------------------------------------------------------------------------------

/// Each writes exactly the message's size. Names that are too long are our own bug (checked).
void encode(const Hello& m, uint8_t out[kHelloSize]);
void encode(const Welcome& m, uint8_t out[kWelcomeSize]);
void encode(const Confirm& m, uint8_t out[kConfirmSize]);
void encode(const Kick& m, uint8_t out[kKickSize]);
void encode(const Where& m, uint8_t out[kWhereSize]);
void encode(const Here& m, uint8_t out[kHereSize]);

/// Each wants exactly one whole message in data[0, n). EPROTONOSUPPORT: a version that we do not
/// speak, to be answered with Verdict::kVersion. EPROTO: anything else.
Checked<Hello> decode_hello(const uint8_t* data, size_t n);
Checked<Welcome> decode_welcome(const uint8_t* data, size_t n);
Checked<Confirm> decode_confirm(const uint8_t* data, size_t n);
Checked<Kick> decode_kick(const uint8_t* data, size_t n);
Checked<Where> decode_where(const uint8_t* data, size_t n);
Checked<Here> decode_here(const uint8_t* data, size_t n);

}  // namespace rsock::wire
