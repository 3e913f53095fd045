#include "core/wire/mac.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace rsock::wire {
namespace {

// FIPS 180-4, 4.2.2: cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
constexpr size_t kBlock = 64;

class Sha256 {
 public:
  void add(std::span<const uint8_t> bytes) {
    size_ += bytes.size();
    while (!bytes.empty()) {
      const size_t n = std::min(bytes.size(), kBlock - held_);
      std::memcpy(block_ + held_, bytes.data(), n);
      held_ += n;
      bytes = bytes.subspan(n);
      if (held_ == kBlock) compress();
    }
  }

  /// Once, at last.
  Digest finish() {
    const uint64_t bits = size_ * 8;
    constexpr uint8_t kEnd[kBlock] = {0x80};
    add({kEnd, 1 + (2 * kBlock - 9 - held_) % kBlock});
    uint8_t length[8];
    for (size_t i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
    add(length);
    Digest out;
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return out;
  }

 private:
  /// FIPS 180-4, 6.2.2.
  void compress() {
    uint32_t w[64];
    for (size_t i = 0; i < 16; ++i) {
      const uint8_t* b = block_ + 4 * i;
      w[i] = uint32_t{b[0]} << 24 | uint32_t{b[1]} << 16 | uint32_t{b[2]} << 8 | b[3];
    }
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t x = w[i - 15], y = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ x >> 3) +
             (std::rotr(y, 17) ^ std::rotr(y, 19) ^ y >> 10);
    }
    uint32_t s[8];
    std::copy(std::begin(state_), std::end(state_), s);
    auto& [a, b, c, d, e, f, g, h] = s;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t t1 = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                          ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t t2 =
          (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    for (size_t i = 0; i < 8; ++i) state_[i] += s[i];
    held_ = 0;
  }

  // Square roots of the first 8 primes (5.3.3).
  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint64_t size_ = 0;
  size_t held_ = 0;
  uint8_t block_[kBlock];
};

// What is signed begins with its purpose and role, so that neither end's proof serves as the
// other's, nor as a JOIN's.
constexpr char kLine[2][16] = {"rsock1 line / P", "rsock1 line / C"};
constexpr char kJoin[2][16] = {"rsock1 join / P", "rsock1 join / C"};
constexpr size_t kPurpose = sizeof(kLine[0]);

}  // namespace

Digest sha256(std::span<const uint8_t> bytes) {
  Sha256 hash;
  hash.add(bytes);
  return hash.finish();
}

Mac hmac_sha256(std::span<const uint8_t> key, std::span<const uint8_t> bytes) {
  uint8_t pad[kBlock] = {};
  if (key.size() > kBlock) {
    const Digest shorter = sha256(key);
    std::copy(shorter.begin(), shorter.end(), pad);
  } else {
    std::copy(key.begin(), key.end(), pad);
  }
  Sha256 inner, outer;
  for (uint8_t& b : pad) b ^= 0x36;
  inner.add(pad);
  inner.add(bytes);
  for (uint8_t& b : pad) b ^= 0x36 ^ 0x5c;
  outer.add(pad);
  outer.add(inner.finish());
  return outer.finish();
}

Mac prove(std::span<const uint8_t> key, bool caller, const Greeting& mine, const Greeting& theirs) {
  if (key.empty()) return {};
  uint8_t text[kPurpose + 2 * kGreetingSize];
  std::memcpy(text, kLine[caller], kPurpose);
  encode(mine, text + kPurpose);
  encode(theirs, text + kPurpose + kGreetingSize);
  return hmac_sha256(key, text);
}

uint64_t seal_join(std::span<const uint8_t> key, bool caller, const Join& join) {
  if (key.empty()) return 0;
  uint8_t text[kPurpose + kJoinSize];
  std::memcpy(text, kJoin[caller], kPurpose);
  Join bare = join;
  bare.mac = 0;
  encode(bare, text + kPurpose);
  const Mac mac = hmac_sha256(key, text);
  uint64_t first = 0;
  std::memcpy(&first, mac.data(), sizeof(first));
  return first;
}

bool equal(std::span<const uint8_t> a, std::span<const uint8_t> b) {
  if (a.size() != b.size()) return false;
  uint32_t differ = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    differ |= uint32_t{a[i]} ^ b[i];
    asm("" : "+r"(differ));  // else the compiler may leave the loop at the first difference
  }
  return differ == 0;
}

}  // namespace rsock::wire
