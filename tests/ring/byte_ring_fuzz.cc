// Both views of a ring whose words somebody else writes: the input is a script of calls and of
// hostile stores. The ring is a heap block of its exact size and so is every buffer: ASan sees any
// step out.

#include <cstdlib>
#include <memory>
#include <vector>

#include "core/ring/byte_ring.h"
#include "tests/ring/copy_unread.h"

using namespace rsock::ring;

namespace {

constexpr size_t kCapacity = 256;

struct Script {
  const uint8_t* at;
  const uint8_t* end;
  bool done() const { return at == end; }
  uint8_t byte() { return at == end ? 0 : *at++; }
  uint64_t word(uint64_t near) {
    switch (byte() % 6) {
      case 0: {
        uint64_t w = 0;
        for (int i = 0; i < 8; ++i) w = w << 8 | byte();
        return w;
      }
      case 1:
        return near + byte();
      case 2:
        return near - byte();
      case 3:
        return near + kCapacity + byte() - 128;
      case 4:
        return near | kSealEnded;
      default:
        return near | kSealFrozen;
    }
  }
};

void require(bool ok) {
  if (!ok) abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::atomic<uint64_t> tail{0};
  std::atomic<uint64_t> head{0};
  auto bytes = std::make_unique<std::byte[]>(kCapacity);
  RingWriter writer(bytes.get(), kCapacity, tail, head);
  RingReader reader(bytes.get(), kCapacity, tail, head);
  Script s{data, data + size};
  for (int steps = 0; !s.done() && steps < 400; ++steps) {
    const uint8_t what = s.byte() % 10;
    const size_t n = s.byte() * 2;
    std::vector<char> buffer(n);
    const iovec iov[2] = {{buffer.data(), n / 2}, {buffer.data() + n / 2, n - n / 2}};
    IovCursor cursor(iov, 2, s.byte() % 8);
    switch (what) {
      case 0:
      case 1:
        require(writer.write(cursor, s.byte() * 3u) <= n);
        break;
      case 2:
      case 3:
        require(reader.read(cursor, s.byte() * 3u) <= n);
        break;
      case 4:
        require(reader.peek(cursor, s.byte() * 3u) <= n);
        break;
      case 5:
        require(reader.discard(n) <= n);
        break;
      case 6:
        require(rsock::ring::copy_unread(writer, s.word(writer.tail()), buffer.data(), n) <= n);
        break;
      case 7:
        tail.store(s.word(reader.head()));
        break;
      case 8:
        head.store(s.word(writer.tail()));
        break;
      default:
        (void)(n % 3 == 0 ? reader.freeze() : writer.seal(n % 3 == 1 ? kSealEnded : kSealFrozen));
    }
    require(writer.room() <= kCapacity && reader.available() <= kCapacity);
  }
  return 0;
}
