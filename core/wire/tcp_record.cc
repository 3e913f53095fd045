#include "core/wire/tcp_record.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/base/check.h"

namespace rsock::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire structs are the bytes");

/// What no honest peer sends; nullptr when the record is possible.
const char* fault_of(const Record& r) {
  if (r.type < RecordType::kData || r.type > RecordType::kFin) return "unknown record type";
  if (r.type == RecordType::kData) {
    if (r.length == 0) return "record without data";
    if (r.length > kMaxRecordData) return "record too long";
    if (r.offset + r.length < r.offset) return "record beyond the end of numbers";
    return nullptr;
  }
  return r.length != 0 ? "length in a record without data" : nullptr;
}

}  // namespace

void encode(const Record& record, uint8_t out[kRecordSize]) {
  RSOCK_CHECK(fault_of(record) == nullptr);
  RecordWire w{};
  w.magic = kRecordMagic;
  w.type = static_cast<uint8_t>(record.type);
  w.generation = record.generation;
  w.length = record.length;
  w.offset = record.offset;
  std::memcpy(out, &w, sizeof(w));
}

const char* RecordDecoder::parse(Record* out) const {
  RecordWire w;
  std::memcpy(&w, header_, sizeof(w));
  if (w.magic != kRecordMagic) return "record magic";
  if (w.zero != 0 || w.zero2 != 0) return "reserved bytes used";
  *out = Record{static_cast<RecordType>(w.type), w.generation, w.length, w.offset};
  return fault_of(*out);
}

RecordDecoder::Event RecordDecoder::broken(const char* reason) {
  state_ = State::kBroken;
  reason_ = reason;
  held_ = data_left_ = 0;
  Event e;
  e.kind = Kind::kBroken;
  e.reason = reason;
  return e;
}

RecordDecoder::Event RecordDecoder::header(const uint8_t* data, size_t n) {
  Event e;
  e.used = std::min(n, kRecordSize - held_);
  std::memcpy(header_ + held_, data, e.used);
  held_ += e.used;
  if (held_ < kRecordSize) return e;
  if (const char* why = parse(&current_)) {
    const size_t used = e.used;
    e = broken(why);
    e.used = used;
    return e;
  }
  held_ = 0;
  e.kind = Kind::kRecord;
  e.record = current_;
  if (current_.type == RecordType::kData) {
    state_ = State::kPayload;
    data_left_ = current_.length;
  } else if (current_.type == RecordType::kRaw) {
    state_ = State::kRaw;
  } else if (current_.type == RecordType::kFin) {
    state_ = State::kFinished;
  }
  return e;
}

RecordDecoder::Event RecordDecoder::next(const uint8_t* data, size_t n) {
  Event e;
  if (state_ == State::kBroken) return broken(reason_);
  if (n == 0) return e;
  switch (state_) {
    case State::kHeader:
      return header(data, n);
    case State::kPayload:
      e.kind = Kind::kData;
      e.used = std::min<size_t>(n, data_left_);
      e.bytes = {data, e.used};
      e.record = current_;
      data_left_ -= static_cast<uint32_t>(e.used);
      current_.offset += e.used;
      current_.length = data_left_;
      if (data_left_ == 0) state_ = State::kHeader;
      return e;
    case State::kRaw:
      e.kind = Kind::kRaw;
      e.used = n;
      e.bytes = {data, n};
      return e;
    case State::kFinished:
      return broken("bytes behind the end of the stream");
    case State::kBroken:
      break;
  }
  return broken(reason_);
}

size_t RecordDecoder::wanted() const {
  switch (state_) {
    case State::kHeader:
      return kRecordSize - held_;
    case State::kPayload:
      return data_left_;
    default:
      return 0;
  }
}

}  // namespace rsock::wire
