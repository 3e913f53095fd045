// Records in the TCP stream of a connection whose overlay path can fail (PROTOCOL.md, "Framed
// TCP").
//
// Purpose: while such a path is up, the TCP stream carries records instead of raw bytes: the user's
// bytes with their offset, and what the ends tell each other about moves. Pure: this file knows the
// bytes, the stream knows what they mean.
// Layout: a 24-byte header, little-endian, followed by `length` bytes for DATA only.
// Ownership: a decoder holds at most one header; payload is handed on as it arrives, never
// buffered. Thread safety: a decoder belongs to one thread at a time (the stream's rx lock). Trust:
// the decoder takes any bytes in any split. An impossible record ends it: kBroken for good. Not
// decided here: whether offsets and generations fit the stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace rsock::wire {

inline constexpr uint16_t kRecordMagic = 0x5352;  // "RS", little-endian
inline constexpr uint32_t kMaxRecordData = 1 << 20;

enum class RecordType : uint8_t {
  kData = 1,    // `length` bytes of the stream, from `offset` on
  kReturn = 2,  // receiver: channel `generation` is frozen, I have everything before `offset`
  kEnd = 3,     // sender: nothing follows on channel `generation` from `offset` on
  kUp = 4,      // sender: from `offset` on I send over channel `generation`
  kRaw = 5,     // no record follows: raw bytes from `offset` on, for good
  kFin = 6,     // the stream ends at `offset`; nothing follows
};

/// `offset` counts bytes of the stream for kData, kUp, kRaw and kFin, bytes of the channel for
/// kReturn and kEnd.
struct Record {
  RecordType type{};
  uint32_t generation = 0;
  uint32_t length = 0;  // kData only: 1..kMaxRecordData
  uint64_t offset = 0;
};

struct RecordWire {
  uint16_t magic;
  uint8_t type;
  uint8_t zero;
  uint32_t generation;
  uint32_t length;
  uint32_t zero2;
  uint64_t offset;
};
static_assert(offsetof(RecordWire, type) == 2 && offsetof(RecordWire, generation) == 4);
static_assert(offsetof(RecordWire, length) == 8 && offsetof(RecordWire, offset) == 16);
static_assert(sizeof(RecordWire) == 24);
inline constexpr size_t kRecordSize = sizeof(RecordWire);

/// Writes the header. What decode would refuse is our own bug (checked).
void encode(const Record& record, uint8_t out[kRecordSize]);

/// Reads a stream of records, however it is cut.
class RecordDecoder {
 public:
  enum class Kind : uint8_t {
    kMore,    // all bytes taken, no event
    kRecord,  // `record` is complete (a kData's payload follows as kData events)
    kData,    // `bytes` of the stream, beginning at `record.offset`
    kRaw,     // `bytes` after a kRaw record; so is all that follows
    kBroken,  // not a record: `reason`
  };
  struct Event {
    Kind kind = Kind::kMore;
    size_t used = 0;  // bytes taken from the input
    Record record;
    std::span<const uint8_t> bytes;
    const char* reason = "";
  };

  /// Takes bytes from data[0, n) up to the next event. Call again with the rest until used == n.
  Event next(const uint8_t* data, size_t n);

  /// How many bytes complete what has begun: the rest of a header, or of a payload. A reader that
  /// asks the kernel for no more than that never takes a byte beyond the current record. 0: no
  /// bound (raw), or no byte is expected (after kFin, broken).
  size_t wanted() const;
  /// A record or its payload has begun and is not complete: an end of the stream here is a loss.
  bool inside_record() const { return held_ != 0 || data_left_ != 0; }

 private:
  enum class State : uint8_t { kHeader, kPayload, kRaw, kFinished, kBroken };

  Event header(const uint8_t* data, size_t n);
  Event broken(const char* reason);
  const char* parse(Record* out) const;

  State state_ = State::kHeader;
  const char* reason_ = "";
  uint8_t header_[kRecordSize] = {};
  size_t held_ = 0;  // bytes of header_
  uint32_t data_left_ = 0;
  Record current_;
};

}  // namespace rsock::wire
