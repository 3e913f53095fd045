// Where a channel says its control words when they can't live in memory that both ends map.
//
// Ownership: the line outlives the channel (shared_ptr). Thread safety: any thread, under any lock
// of a stream; a leaf lock of its own. Never blocks. Words of one channel arrive in the order in
// which they were said, or not at all: then the line is down, and the channel hears line_down().
#pragma once

#include <cstdint>

#include "core/wire/line.h"

namespace rsock::transport {

class WordLine {
 public:
  virtual ~WordLine() = default;
  virtual void say(uint64_t nonce, wire::Word word, uint64_t value) noexcept = 0;
  /// The channel has something for the keeper to look at (a word was answered, the path failed,
  /// memory is to be given back): it comes to the stream's attend() soon. Any thread, any lock.
  virtual void attention(uint64_t nonce) noexcept = 0;
};

}  // namespace rsock::transport
