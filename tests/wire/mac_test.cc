#include "core/wire/mac.h"

#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "tests/wire/tuples.h"

namespace rsock::wire {
namespace {

using Bytes = std::vector<uint8_t>;

Bytes bytes(const std::string& text) { return Bytes(text.begin(), text.end()); }

std::string hex(const Digest& d) {
  std::string out;
  for (const uint8_t b : d) {
    out += "0123456789abcdef"[b >> 4];
    out += "0123456789abcdef"[b & 15];
  }
  return out;
}

// FIPS 180-4's examples (NIST, "SHA256.pdf" and "SHA2_Additional.pdf").
TEST(Sha256, GivesThePublishedDigests) {
  EXPECT_EQ(hex(sha256(bytes("abc"))),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256(bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256(bytes("\xbd"))),
            "68325720aabd7c82f30f554b313d0570c95accbb7dc4b5aae11204c08ffe732b");
  EXPECT_EQ(hex(sha256(Bytes(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Where the padding's length steps into a block of its own.
TEST(Sha256, PadsRightAroundTheEndOfABlock) {
  EXPECT_EQ(hex(sha256(Bytes(55, 0))),
            "02779466cdec163811d078815c633f21901413081449002f24aa3e80f0b88ef7");
  EXPECT_EQ(hex(sha256(Bytes(56, 0))),
            "d4817aa5497628e7c77e6b606107042bbba3130888c5f47a375e6179be789fbb");
  EXPECT_EQ(hex(sha256(Bytes(64, 0))),
            "f5a5fd42d16a20302798ef6ed309979b43003d2320d9f0e8ea9831a92759fb4b");
}

TEST(HmacSha256, GivesTheDigestsOfRfc4231) {
  const auto hmac = [](const Bytes& key, const Bytes& text) { return hex(hmac_sha256(key, text)); };
  EXPECT_EQ(hmac(Bytes(20, 0x0b), bytes("Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac(bytes("Jefe"), bytes("what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac(Bytes(20, 0xaa), Bytes(50, 0xdd)),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  Bytes counted;
  for (uint8_t i = 1; i <= 25; ++i) counted.push_back(i);
  EXPECT_EQ(hmac(counted, Bytes(50, 0xcd)),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hmac(Bytes(20, 0x0c), bytes("Test With Truncation")).substr(0, 32),
            "a3b6167473100ee06e0c796c2955552b");
  EXPECT_EQ(hmac(Bytes(131, 0xaa), bytes("Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hmac(Bytes(131, 0xaa),
                 bytes("This is a test using a larger than block-size key and a larger than "
                       "block-size data. The key needs to be hashed before being used by the HMAC "
                       "algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

const Bytes kKey = bytes("sixteen bytes at least");
const Greeting kMine{.keyed = true, .keeper = 1, .challenge = 2};
const Greeting kTheirs{.keyed = true, .keeper = 3, .challenge = 4};

TEST(Proof, CoversTheKeyTheRoleAndBothGreetings) {
  std::set<std::string> all{
      hex(prove(kKey, true, kMine, kTheirs)), hex(prove(kKey, false, kMine, kTheirs)),
      hex(prove(kKey, true, kTheirs, kMine)), hex(prove(bytes("another"), true, kMine, kTheirs))};
  size_t wanted = 4;
  const std::function<void(Greeting&)> changes[] = {
      [](Greeting& m) { m.version_min = 0; }, [](Greeting& m) { m.version_max = 9; },
      [](Greeting& m) { m.keyed = false; }, [](Greeting& m) { m.keeper ^= uint64_t{1} << 63; },
      [](Greeting& m) { m.challenge ^= 1; }};
  for (const auto& change : changes) {
    Greeting mine = kMine, theirs = kTheirs;
    change(mine);
    change(theirs);
    all.insert(hex(prove(kKey, true, mine, kTheirs)));
    all.insert(hex(prove(kKey, true, kMine, theirs)));
    wanted += 2;
  }
  EXPECT_EQ(all.size(), wanted);
  EXPECT_EQ(prove(kKey, true, kMine, kTheirs), prove(kKey, true, kMine, kTheirs));
}

TEST(SealedJoin, CoversTheKeyTheRoleAndAllButTheMac) {
  const Join join{.nonce = 1, .ring_address = 4096, .ring_key = 2, .ring_size = 1 << 20};
  std::set<uint64_t> all{seal_join(kKey, true, join), seal_join(kKey, false, join),
                         seal_join(bytes("another"), true, join)};
  size_t wanted = 3;
  const std::function<void(Join&)> changes[] = {
      [](Join& m) { m.nonce ^= uint64_t{1} << 63; },
      [](Join& m) { m.ring_address ^= uint64_t{1} << 63; }, [](Join& m) { m.ring_key ^= 1u << 31; },
      [](Join& m) { m.ring_size ^= 1 << 19; }};
  for (const auto& change : changes) {
    Join other = join;
    change(other);
    all.insert(seal_join(kKey, true, other));
    ++wanted;
  }
  EXPECT_EQ(all.size(), wanted);
  EXPECT_EQ(all.count(0), 0u);
  Join sealed = join;
  sealed.mac = seal_join(kKey, true, join);
  EXPECT_EQ(seal_join(kKey, true, sealed), sealed.mac);
}

// Both ends on two builds must agree: the text under the proof is part of the protocol.
TEST(Proof, AndSealedJoinAreWhatPythonsHmacMakesOfThePagesText) {
  EXPECT_EQ(hex(prove(kKey, true, kMine, kTheirs)),
            "f74f580b47a678eb5d60d24e090652a4b2abc1305b358c1f5bb28a6aa62aa9d2");
  EXPECT_EQ(seal_join(kKey, false,
                      {.nonce = 1, .ring_address = 4096, .ring_key = 2, .ring_size = 1 << 20}),
            0xd34f24cc6965e0beu);
}

TEST(Proof, IsZeroWithoutAKey) {
  EXPECT_EQ(prove({}, true, kMine, kTheirs), Mac{});
  EXPECT_EQ(seal_join({}, true, Join{.ring_size = 1 << 20}), 0u);
}

TEST(Equal, LooksAtEveryByteAndTheSize) {
  Bytes a(32, 7);
  EXPECT_TRUE(equal(a, Bytes(32, 7)));
  EXPECT_TRUE(equal({}, {}));
  EXPECT_FALSE(equal(a, Bytes(31, 7)));
  for (size_t i = 0; i < a.size(); ++i) {
    Bytes b = a;
    b[i] ^= 0x80;
    EXPECT_FALSE(equal(a, b)) << i;
  }
}

}  // namespace
}  // namespace rsock::wire
