// HMAC-SHA256 (FIPS 180-4, RFC 2104), and what it covers on the line and in JOIN.
//
// Purpose: where hosts have users that do not trust each other, both ends of a line prove that they
// know a shared key (RSOCK_KEY_FILE). Own code because it is in every process that is preloaded: a
// crypto library would be one more file to load, with symbols that the program may have in another
// version. Thread safety: pure functions. No allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/wire/cm_data.h"
#include "core/wire/line.h"

namespace rsock::wire {

using Digest = std::array<uint8_t, 32>;
Digest sha256(std::span<const uint8_t> bytes);
Mac hmac_sha256(std::span<const uint8_t> key, std::span<const uint8_t> bytes);

/// PROOF of one end. `mine` is the prover's greeting, `theirs` the one that it answers; `caller`:
/// the prover opened the line. Zeros if the key is empty.
Mac prove(std::span<const uint8_t> key, bool caller, const Greeting& mine, const Greeting& theirs);
/// JOIN's mac: over all of it with mac 0, and the role. 0 if the key is empty.
uint64_t seal_join(std::span<const uint8_t> key, bool caller, const Join& join);
/// Takes the same time wherever the two differ.
bool equal(std::span<const uint8_t> a, std::span<const uint8_t> b);

}  // namespace rsock::wire
