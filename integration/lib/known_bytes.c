#include "known_bytes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static uint8_t* ribbon; /* the tile, repeated until a message may start anywhere in the first */

uint64_t split_mix(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

size_t below(uint64_t* random, size_t limit) { return split_mix(random) % limit; }

size_t random_size(uint64_t* random, size_t largest) {
  double exponent = (double)(split_mix(random) >> 11) / 9007199254740992.0;
  size_t size = (size_t)exp(exponent * log((double)largest + 1));
  return size < 1 ? 1 : size > largest ? largest : size;
}

static uint32_t crc_table[256];

void make_known_bytes(uint64_t seed) {
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (c & 1 ? 0xedb88320u : 0);
    crc_table[i] = c;
  }
  ribbon = malloc(kTile + kLargest + 8);
  if (ribbon == NULL) abort();
  uint64_t state = seed;
  for (size_t i = 0; i < kTile; i += 8) {
    uint64_t word = split_mix(&state);
    memcpy(ribbon + i, &word, 8); /* little-endian, as hash_pair.py has it */
  }
  for (size_t i = kTile; i < kTile + kLargest; ++i) ribbon[i] = ribbon[i - kTile];
}

uint32_t crc_of(uint32_t crc, const uint8_t* data, size_t size) {
  crc = ~crc;
  for (size_t i = 0; i < size; ++i) crc = crc_table[(crc ^ data[i]) & 255] ^ (crc >> 8);
  return ~crc;
}

const uint8_t* known_bytes_at(uint64_t offset) { return ribbon + offset % kTile; }
