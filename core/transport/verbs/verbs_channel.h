// A channel over a reliable queue pair: bytes by RDMA WRITE into the peer's ring, control words by the keepers' line.
//
// Contract: core/transport/transport.h. What is particular here:
//  - Each end has both rings and all words of its own in its own memory; a byte_ring view works on each. What a peer
//    says (a completion's length, a credit, a word of the line) is checked and then stored in a word that only we write.
//  - Data: RDMA WRITE at the same offset of the peer's ring, with the length as immediate value. The receiver trusts the
//    completion, never the bytes. A first message goes at once; while some are in flight, small ones gather and leave
//    with the next completion.
//  - Credits: an empty write whose immediate value is the bytes consumed since the last one; at half a ring.
//  - tx_end() and tx_recall() are questions: they return kOpen, and the answer (END_OK or FROZEN, never both) turns the
//    direction later. Until then the direction takes no bytes. END_OK means that every byte is in the peer's memory.
//  - Failure of the queue pair loses bytes in flight, never words: path_failed() says so, and the stream moves both
//    directions back to TCP by the words.
//
// Locks: post_mutex_ guards the send queue. Called under a stream's lock or under the device's queue lock.
#pragma once

#include <atomic>
#include <memory>

#include "core/os/owned_fd.h"
#include "core/ring/byte_ring.h"
#include "core/transport/transport.h"
#include "core/transport/verbs/device.h"
#include "core/transport/word_line.h"
#include "core/wire/cm_data.h"

namespace rsock::transport::verbs {

/// Where the peer's receive ring is, as its JOIN said (checked by the decoder).
struct RemoteRing {
  uint64_t address = 0;
  uint32_t key = 0;
  uint32_t size = 0;
};

// class VerbsChannel final : public Channel — in the making; used by the keeper as:
//   std::shared_ptr<VerbsChannel> make_verbs_channel(std::shared_ptr<Device>, QueuePair&&, const RemoteRing&,
//                                                    uint64_t nonce, std::shared_ptr<WordLine>);   // before the queue
//                                                    pair carries anything; null: no descriptor left
//   void channel->on_word(wire::Word, uint64_t value) noexcept;  // keeper: from the line. May come before attach().
//   void channel->line_down() noexcept;                          // keeper: the line is gone; words end here.
//   void channel->connected() noexcept;   // keeper: ESTABLISHED; may be posted on from here on
//   void channel->fail_path(const char* reason) noexcept;        // any thread: DISCONNECTED, device removal ...

}  // namespace rsock::transport::verbs
