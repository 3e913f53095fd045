#include "core/ring/byte_ring.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/ring/copy_unread.h"

namespace rsock::ring {
namespace {

constexpr size_t kCapacity = 64;

/// Both views of one ring. The bytes are a heap block of exactly the capacity: ASan sees any step
/// out.
struct Ring {
  explicit Ring(size_t capacity = kCapacity)
      : bytes(std::make_unique<std::byte[]>(capacity)),
        writer(bytes.get(), capacity, tail, head),
        reader(bytes.get(), capacity, tail, head) {}

  size_t write(const std::string& s) {
    const iovec iov{const_cast<char*>(s.data()), s.size()};
    IovCursor from(&iov, 1, 0);
    return writer.write(from, s.size());
  }
  std::string read(size_t n) { return take(n, &RingReader::read); }
  std::string peek(size_t n) { return take(n, &RingReader::peek); }

  std::string take(size_t n, size_t (RingReader::*how)(IovCursor&, size_t)) {
    std::string s(n, '\0');
    const iovec iov{s.data(), n};
    IovCursor to(&iov, 1, 0);
    s.resize((reader.*how)(to, n));
    return s;
  }

  std::atomic<uint64_t> tail{0};
  std::atomic<uint64_t> head{0};
  std::unique_ptr<std::byte[]> bytes;
  RingWriter writer;
  RingReader reader;
};

TEST(ByteRing, GivesBackWhatWasWrittenInOrder) {
  Ring r;
  EXPECT_EQ(r.write("one "), 4u);
  EXPECT_EQ(r.write("two"), 3u);
  EXPECT_EQ(r.reader.available(), 7u);
  EXPECT_EQ(r.read(100), "one two");
  EXPECT_EQ(r.reader.available(), 0u);
  EXPECT_EQ(r.read(100), "");
}

TEST(ByteRing, ReaderSeesNothingBeforePublish) {
  Ring r;
  std::memset(r.bytes.get(), 'x', kCapacity);
  EXPECT_EQ(r.reader.available(), 0u);
  EXPECT_EQ(r.read(10), "");
}

TEST(ByteRing, TakesNoMoreThanItsCapacity) {
  Ring r;
  EXPECT_EQ(r.write(std::string(100, 'a')), kCapacity);
  EXPECT_EQ(r.writer.room(), 0u);
  EXPECT_EQ(r.write("b"), 0u);
  EXPECT_EQ(r.read(10).size(), 10u);
  EXPECT_EQ(r.writer.room(), 10u);
  EXPECT_EQ(r.write("bcdefghijklmn"), 10u);
  EXPECT_EQ(r.read(200), std::string(54, 'a') + "bcdefghijk");
}

TEST(ByteRing, WrapsInTheMiddleOfAMessage) {
  Ring r;
  for (int i = 0; i < 100; ++i) {
    const std::string s = "message number " + std::to_string(i);
    ASSERT_EQ(r.write(s), s.size());
    ASSERT_EQ(r.read(s.size()), s);
  }
  EXPECT_EQ(r.writer.tail(), r.reader.head());
}

TEST(ByteRing, PeekConsumesNothing) {
  Ring r;
  r.write("abc");
  EXPECT_EQ(r.peek(2), "ab");
  EXPECT_EQ(r.peek(9), "abc");
  EXPECT_EQ(r.reader.head(), 0u);
  EXPECT_EQ(r.read(9), "abc");
}

TEST(ByteRing, DiscardConsumesWithoutCopying) {
  Ring r;
  r.write("abcdef");
  EXPECT_EQ(r.reader.discard(4), 4u);
  EXPECT_EQ(r.read(9), "ef");
  EXPECT_EQ(r.reader.discard(4), 0u);
}

TEST(ByteRing, LooksAtTheOtherWordOnlyWhenItMust) {
  Ring r;
  r.write("abcdef");
  EXPECT_EQ(r.read(3), "abc");  // the reader knows of six bytes now
  r.tail.store(999);            // a word that would fail it
  EXPECT_EQ(r.read(3), "def");
  EXPECT_FALSE(r.reader.failed());
  EXPECT_EQ(r.read(1), "");
  EXPECT_TRUE(r.reader.failed());
}

TEST(ByteRing, CopiesUnreadBytesOutAgainAcrossTheEdge) {
  Ring r;
  r.write(std::string(50, '.'));
  r.read(50);
  r.write("0123456789abcdefghijklmnop");
  std::string s(20, '\0');
  EXPECT_EQ(ring::copy_unread(r.writer, 53, s.data(), 20), 20u);
  EXPECT_EQ(s, "3456789abcdefghijklm");
}

TEST(ByteRing, CopiesNothingFromOutsideTheLastCapacityBytes) {
  Ring r;
  for (int i = 0; i < 3; ++i) {
    r.write(std::string(50, '.'));
    r.read(50);
  }
  char c;
  EXPECT_EQ(ring::copy_unread(r.writer, 151, &c, 1), 0u);         // beyond the tail
  EXPECT_EQ(ring::copy_unread(r.writer, 149, &c, 2), 0u);         // runs beyond the tail
  EXPECT_EQ(ring::copy_unread(r.writer, 85, &c, 1), 0u);          // overwritten since
  EXPECT_EQ(ring::copy_unread(r.writer, UINT64_MAX, &c, 2), 0u);  // wraps around the numbers
  EXPECT_EQ(ring::copy_unread(r.writer, 86, &c, 1), 1u);
}

// --- hostile words
// --------------------------------------------------------------------------------

TEST(ByteRingHostile, TailBeyondTheCapacityFailsTheReader) {
  Ring r;
  r.tail.store(kCapacity + 1);
  EXPECT_EQ(r.reader.available(), 0u);
  EXPECT_TRUE(r.reader.failed());
  EXPECT_EQ(r.read(10), "");
}

TEST(ByteRingHostile, TailThatMovesBackwardsFailsTheReader) {
  Ring r;
  r.write("abcdef");
  EXPECT_EQ(r.read(2), "ab");
  r.tail.store(4);
  EXPECT_EQ(r.reader.available(), 0u);
  EXPECT_TRUE(r.reader.failed());
}

TEST(ByteRingHostile, TailBehindTheHeadFailsTheReader) {
  Ring r;
  r.write("abcdef");
  r.read(6);
  r.tail.store(5);
  EXPECT_EQ(r.reader.available(), 0u);
  EXPECT_TRUE(r.reader.failed());
}

TEST(ByteRingHostile, HeadBeyondTheTailFailsTheWriter) {
  Ring r;
  r.write("abc");
  r.head.store(4);
  EXPECT_EQ(r.writer.room(), 0u);
  EXPECT_TRUE(r.writer.failed());
  EXPECT_EQ(r.write("d"), 0u);
}

TEST(ByteRingHostile, HeadThatMovesBackwardsFailsTheWriter) {
  Ring r;
  r.write("abcdef");
  r.read(4);
  EXPECT_EQ(r.writer.room(), kCapacity - 2);
  r.head.store(3);
  EXPECT_EQ(r.writer.room(), 0u);
  EXPECT_TRUE(r.writer.failed());
}

TEST(ByteRingHostile, AFailedEndStaysFailedWhenTheWordIsRepaired) {
  Ring r;
  r.write("abc");
  r.tail.store(1000);
  EXPECT_EQ(r.reader.available(), 0u);
  r.tail.store(3);
  EXPECT_EQ(r.reader.available(), 0u);
  EXPECT_TRUE(r.reader.failed());
}

TEST(ByteRingHostile, OwnHeadRewrittenByTheOtherEndFailsTheReader) {
  Ring r;
  r.write("abcdef");
  r.head.store(2);
  EXPECT_EQ(r.read(3), "");
  EXPECT_TRUE(r.reader.failed());
}

// --- seals
// ----------------------------------------------------------------------------------------

TEST(ByteRingSeal, ReleaseAfterARecallDoesNotCount) {
  Ring r;
  r.write("abcdef");
  EXPECT_EQ(r.read(2), "ab");
  EXPECT_EQ(r.writer.seal(kSealFrozen), 2u);
  EXPECT_EQ(r.read(2), "");
  EXPECT_EQ(r.reader.discard(2), 0u);
  EXPECT_EQ(r.reader.available(), 0u);
  EXPECT_EQ(r.reader.head(), 2u);
  EXPECT_FALSE(r.reader.failed());
  EXPECT_EQ(r.head.load(), 2u | kSealFrozen);
}

TEST(ByteRingSeal, ReaderDrainsAnEndedRing) {
  Ring r;
  r.write("abcdef");
  EXPECT_EQ(r.writer.seal(kSealEnded), 0u);
  EXPECT_EQ(r.write("more"), 0u);
  EXPECT_EQ(r.read(4), "abcd");
  EXPECT_EQ(r.read(4), "ef");
  EXPECT_EQ(r.head.load(), 6u | kSealEnded);
}

TEST(ByteRingSeal, FreezeAfterAnEndFindsTheEnd) {
  Ring r;
  r.write("abcdef");
  r.read(1);
  r.writer.seal(kSealEnded);
  EXPECT_EQ(r.reader.freeze(), 1u | kSealEnded);
  EXPECT_EQ(r.read(9), "bcdef");
}

TEST(ByteRingSeal, FreezeIsFinalAndExact) {
  Ring r;
  r.write("abcdef");
  r.read(2);
  EXPECT_EQ(r.reader.freeze(), 2u | kSealFrozen);
  EXPECT_EQ(r.read(9), "");
  EXPECT_EQ(r.peek(9), "");
  EXPECT_EQ(r.writer.seal(kSealEnded), 2u | kSealFrozen);
  EXPECT_EQ(r.reader.freeze(), 2u | kSealFrozen);
}

TEST(ByteRingSeal, WriterStillCountsRoomOfAFrozenRing) {
  Ring r;
  r.write("abcdef");
  r.read(2);
  r.reader.freeze();
  EXPECT_EQ(r.writer.room(), kCapacity - 4);
  EXPECT_EQ(r.writer.unread(), 4u);
  EXPECT_FALSE(r.writer.failed());
}

TEST(ByteRingSeal, AWordThatChangesForEverFailsTheReaderInsteadOfHoldingIt) {
  Ring r(4096);
  std::atomic<bool> stop{false};
  std::thread hostile([&] {
    for (uint64_t i = 0; !stop.load(); ++i) r.head.store(i & 1 ? kSealEnded : 0);
  });
  for (int i = 0; i < 200 && !r.reader.failed(); ++i) {
    r.tail.store(std::min<uint64_t>(4096, i));
    r.read(1);
  }
  stop.store(true);
  hostile.join();
  SUCCEED();  // it returned
}

// --- two threads
// ----------------------------------------------------------------------------------

/// Byte i of an endless stream; a slip by any small distance shows.
char byte_at(uint64_t i) { return static_cast<char>((i * 2654435761u) >> 13); }

TEST(ByteRingThreads, BytesArriveOnceInOrderWhateverTheSizes) {
  Ring r(1024);
  constexpr uint64_t kTotal = 2'000'000;
  std::thread writer([&] {
    std::mt19937 random(1);
    std::vector<char> buffer(3000);
    for (uint64_t sent = 0; sent < kTotal;) {
      const size_t n = std::min<uint64_t>(1 + random() % buffer.size(), kTotal - sent);
      for (size_t i = 0; i < n; ++i) buffer[i] = byte_at(sent + i);
      const iovec iov[3] = {
          {buffer.data(), n / 3}, {buffer.data(), 0}, {buffer.data() + n / 3, n - n / 3}};
      size_t done = 0;
      while (done < n) {
        IovCursor from(iov, 3, done);
        const size_t w = r.writer.write(from, n - done);
        if (w == 0) std::this_thread::yield();
        done += w;
      }
      sent += n;
    }
  });
  std::mt19937 random(2);
  std::vector<char> buffer(2000);
  uint64_t got = 0;
  uint64_t wrong = 0;
  while (got < kTotal) {
    const size_t n = 1 + random() % buffer.size();
    const iovec iov[2] = {{buffer.data(), n / 2}, {buffer.data() + n / 2, n - n / 2}};
    IovCursor to(iov, 2, 0);
    const size_t m = r.reader.read(to, n);
    if (m == 0) std::this_thread::yield();
    for (size_t i = 0; i < m; ++i) wrong += buffer[i] != byte_at(got + i);
    got += m;
  }
  writer.join();
  EXPECT_EQ(got, kTotal);
  EXPECT_EQ(wrong, 0u);
  EXPECT_FALSE(r.reader.failed() || r.writer.failed());
}

// What the reader delivered plus what the recall gives back is the stream, whenever the recall
// comes.
TEST(ByteRingThreads, RecallSplitsTheStreamExactly) {
  for (int round = 0; round < 2000; ++round) {
    Ring r(1024);
    const std::string sent(700, static_cast<char>('a' + round % 26));
    ASSERT_EQ(r.write(sent), sent.size());
    uint64_t delivered = 0;
    std::thread reader([&] {
      for (int i = 0; i < 200; ++i) {
        const size_t n = r.read(7).size();
        if (n == 0) break;
        delivered += n;
      }
    });
    for (int spin = 0; spin < round % 300; ++spin)
      std::atomic_signal_fence(std::memory_order_seq_cst);
    const uint64_t x = r.writer.seal(kSealFrozen) & kCountMask;
    reader.join();
    ASSERT_EQ(x, delivered);
    ASSERT_EQ(r.reader.head(), delivered);
  }
}

TEST(ByteRingThreads, EndAndFreezeAgreeOnTheWinner) {
  for (int round = 0; round < 3000; ++round) {
    Ring r(1024);
    r.write("abcdef");
    r.read(2);
    uint64_t frozen = 0;
    std::thread reader([&] { frozen = r.reader.freeze(); });
    const uint64_t before = r.writer.seal(kSealEnded);
    reader.join();
    const bool writer_won = (before & kSealFrozen) == 0;
    ASSERT_EQ((frozen & kSealFrozen) == 0, writer_won);
    ASSERT_EQ(r.read(9), writer_won ? "cdef" : "");
  }
}

}  // namespace
}  // namespace rsock::ring
