/* Pseudo-random numbers and an endless known sequence of bytes, the same in hash_pair.py.
 *
 * The sequence repeats after kTile bytes, an odd number, so that no ring or page size hides an
 * error. make_known_bytes() comes first; after it everything may be called by any thread.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { kTile = (1 << 20) + 7, kLargest = 8 << 20 };

void make_known_bytes(uint64_t seed);
const uint8_t* known_bytes_at(uint64_t offset); /* at least kLargest of them */

uint64_t split_mix(uint64_t* state);
size_t below(uint64_t* random, size_t limit);
/* 1 to `largest`, every order of magnitude as likely as the next. */
size_t random_size(uint64_t* random, size_t largest);

uint32_t crc_of(uint32_t crc, const uint8_t* data, size_t size); /* CRC-32 as zlib has it */
