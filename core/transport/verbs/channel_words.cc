// The control words of a channel: what it says on the line, and what the line brings. PROTOCOL.md,
// "Across hosts".

#include <algorithm>

#include "core/base/log.h"
#include "core/transport/verbs/verbs_channel.h"

namespace rsock::transport::verbs {
namespace {

using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
using std::memory_order_seq_cst;
using wire::Word;

}  // namespace

void VerbsChannel::tx_set_start(uint64_t stream_offset) noexcept {
  line_->say(nonce_, Word::kStart, stream_offset);
}

std::optional<uint64_t> VerbsChannel::rx_start() noexcept {
  // acquire pairs with on_word().
  const uint64_t word = rx_.start.load(memory_order_acquire);
  if (word == 0) return std::nullopt;
  return word - 1;
}

void VerbsChannel::rx_set_ready() noexcept { line_->say(nonce_, Word::kReady, 0); }
bool VerbsChannel::tx_peer_ready() noexcept { return tx_.ready.load(memory_order_acquire) != 0; }

Turn VerbsChannel::tx_turn() noexcept {
  // acquire pairs with on_word().
  return wire::turn_of(tx_.head.load(memory_order_acquire), tx_.tail.load(memory_order_relaxed));
}

bool VerbsChannel::tx_maybe_turned() noexcept { return turned_.load(memory_order_acquire); }

Turn VerbsChannel::rx_turn() noexcept {
  return wire::turn_of(rx_.head.load(memory_order_acquire), rx_.tail.load(memory_order_acquire));
}

Turn VerbsChannel::tx_end() noexcept {
  writer_.close();
  if (!end_asked_.load(memory_order_relaxed) && !recall_asked_ &&
      !gone_.load(memory_order_acquire)) {
    end_asked_.store(true,
                     memory_order_release);  // before the answer can come; pairs with on_word()
    line_->say(nonce_, Word::kEnd, writer_.tail());
    (void)push();
  }
  return tx_turn();
}

Turn VerbsChannel::tx_recall() noexcept {
  writer_.close();
  if (tx_turn().kind != TurnKind::kOpen) return tx_turn();
  if (!gone_.load(memory_order_acquire)) {
    if (!recall_asked_) {
      recall_asked_ = true;
      line_->say(nonce_, Word::kRecall, 0);
    }
    return tx_turn();
  }
  // Nobody answers any more. What the peer told of last is exact if it is all that we published;
  // else its process died with bytes of ours, and nobody knows how many: no byte may follow.
  (void)device_->progress();
  uint64_t head = tx_.head.load(memory_order_acquire);
  while ((head & ring::kSealFrozen) == 0) {
    if ((head & ring::kCountMask) != writer_.tail()) {
      tx_lied_.store(true, memory_order_release);
      break;
    }
    if (tx_.head.compare_exchange_weak(head, head | ring::kSealFrozen, memory_order_seq_cst,
                                       memory_order_acquire))
      break;
  }
  return tx_turn();
}

Turn VerbsChannel::rx_freeze() noexcept {
  const Turn turn = wire::turn_of(reader_.freeze(), rx_.tail.load(memory_order_acquire));
  if (turn.kind == TurnKind::kFrozen && !frozen_said_.exchange(true, memory_order_relaxed)) {
    line_->say(nonce_, Word::kFrozen, turn.at);
  }
  return turn;
}

void VerbsChannel::tx_set_replayed() noexcept { line_->say(nonce_, Word::kReplayed, 0); }
bool VerbsChannel::rx_replayed() noexcept { return rx_.replayed.load(memory_order_acquire) != 0; }

void VerbsChannel::let_go() noexcept {
  if (let_go_) return;
  let_go_ = true;
  // What we consumed is final, and the peer must know it. The thread that found the end may not
  // have said so yet: twice is once, but behind BYE it would be too late.
  if (rx_freeze().kind == TurnKind::kEnded && !end_ok_said_.load(memory_order_acquire)) {
    line_->say(nonce_, Word::kEndOk, end_at_.load(memory_order_relaxed));
  }
  line_->say(nonce_, Word::kBye, 0);
}

// --- what the line brings ----------------------------------------------------------------------

void VerbsChannel::on_word(Word word, uint64_t value) noexcept {
  switch (word) {
    case Word::kReady:
      tx_.ready.store(1, memory_order_release);  // pairs with tx_peer_ready()
      break;
    case Word::kStart:
      if (rx_.start.load(memory_order_relaxed) != 0) {
        rx_lied_.store(true, memory_order_release);
      } else {
        rx_.start.store(value + 1, memory_order_release);  // pairs with rx_start()
      }
      break;
    case Word::kFrozen: {
      uint64_t head = tx_.head.load(memory_order_relaxed);
      do {
        if ((head & (ring::kSealFrozen | ring::kSealEnded)) != 0 ||
            value < (head & ring::kCountMask) || value > tx_.tail.load(memory_order_acquire)) {
          // A second answer to the same question is none; nor is one that takes back what was told.
          if ((head & ring::kSealFrozen) == 0) tx_lied_.store(true, memory_order_release);
          break;
        }
        // seq_cst, as on_arrival().
      } while (!tx_.head.compare_exchange_weak(head, value | ring::kSealFrozen,
                                               memory_order_seq_cst, memory_order_relaxed));
      turned_.store(true, memory_order_release);
      break;
    }
    case Word::kRecall:
      asked_back_.store(true, memory_order_release);
      break;
    case Word::kEnd:
      if (end_known_.load(memory_order_relaxed) || value < rx_.tail.load(memory_order_acquire)) {
        rx_lied_.store(true, memory_order_release);
        break;
      }
      end_at_.store(value, memory_order_relaxed);
      end_known_.store(true, memory_order_seq_cst);  // pairs with look_for_end() and on_arrival()
      (void)device_->progress();
      look_for_end();
      break;
    case Word::kEndOk:
      // Only what we asked; the writer is closed then, so the tail stands still.
      if (!end_asked_.load(memory_order_acquire) || value != tx_.tail.load(memory_order_acquire)) {
        tx_lied_.store(true, memory_order_release);
      } else {
        tx_.head.fetch_or(ring::kSealEnded, memory_order_seq_cst);
      }
      turned_.store(true, memory_order_release);
      break;
    case Word::kReplayed:
      rx_.replayed.store(1, memory_order_release);  // pairs with rx_replayed()
      break;
    case Word::kBye:
      // Words keep their order: a direction without a START has not left TCP, and never will.
      // Without this an end that let go of a channel between our READY and its START would be taken
      // for one that died with bytes.
      if (rx_.start.load(memory_order_relaxed) == 0) rx_.replayed.store(1, memory_order_release);
      return line_down();
  }
  wake_all();
}

void VerbsChannel::line_down() noexcept {
  gone_.store(true, memory_order_release);
  turned_.store(true, memory_order_release);
  wake_all();
}

void VerbsChannel::fail_path(const char* reason) noexcept {
  const char* none = nullptr;
  if (!failure_.compare_exchange_strong(none, reason, std::memory_order_acq_rel,
                                        memory_order_relaxed))
    return;
  line_->attention(nonce_);
}

bool VerbsChannel::peer_let_go() noexcept { return gone_.load(memory_order_acquire); }
bool VerbsChannel::rx_asked_back() noexcept { return asked_back_.load(memory_order_acquire); }
const char* VerbsChannel::path_failure() noexcept { return failure_.load(memory_order_acquire); }

}  // namespace rsock::transport::verbs
