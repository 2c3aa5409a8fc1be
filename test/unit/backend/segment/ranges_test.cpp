#include "backend/segment/ranges.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <vector>

namespace hvd::segment {
namespace {

TEST(Slices, CoverEveryByteOnceInWholeLines) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{64}, std::size_t{65},
                                  std::size_t{1000}, std::size_t{262'144}}) {
    for (const std::size_t members : {1U, 2U, 3U, 7U}) {
      std::size_t covered = 0;
      for (std::size_t index = 0; index < members; ++index) {
        const Range slice = slice_of(bytes, index, members);
        EXPECT_EQ(slice.begin, covered) << bytes << " bytes, slice " << index << " of " << members;
        if (slice.end != bytes) {
          EXPECT_EQ(slice.end % 64, 0U);
        }
        EXPECT_LE(slice.size(), (bytes / 64 / members + 2) * 64);
        covered = slice.end;
      }
      EXPECT_EQ(covered, bytes);
    }
  }
}

TEST(Chunks, CoverEveryByteOnceAndAreEmptyBehindTheLast) {
  EXPECT_EQ(round_part(150, 0, 64).size(), 64U);
  EXPECT_EQ(round_part(150, 2, 64).begin, 128U);
  EXPECT_EQ(round_part(150, 2, 64).end, 150U);
  EXPECT_TRUE(round_part(150, 3, 64).empty());
  EXPECT_EQ(round_part(150, 9, 64).begin, 150U);
  EXPECT_TRUE(round_part(0, 0, 64).empty());
}

TEST(Chunks, OfABlockLieInTheBlock) {
  const Range block{100, 250};
  EXPECT_EQ(round_part(block, 0, 64).begin, 100U);
  EXPECT_EQ(round_part(block, 2, 64).begin, 228U);
  EXPECT_EQ(round_part(block, 2, 64).end, 250U);
  EXPECT_TRUE(round_part(block, 3, 64).empty());
}

TEST(Chunks, ThereAreAsManyRoundsAsHoldEverything) {
  EXPECT_EQ(rounds_of(0, 64), 0U);
  EXPECT_EQ(rounds_of(1, 64), 1U);
  EXPECT_EQ(rounds_of(64, 64), 1U);
  EXPECT_EQ(rounds_of(65, 64), 2U);
}

TEST(Blocks, AreContiguousAndTheLargestDeterminesTheRounds) {
  const std::array<std::int64_t, 3> counts = {5, 0, 40};
  const std::vector<Range> blocks = blocks_of(counts, 4);
  ASSERT_EQ(blocks.size(), 3U);
  EXPECT_EQ(blocks[0].end, 20U);
  EXPECT_TRUE(blocks[1].empty());
  EXPECT_EQ(blocks[2].begin, 20U);
  EXPECT_EQ(blocks[2].end, 180U);
  EXPECT_EQ(max_rounds(blocks, 64), 3U);
  EXPECT_EQ(max_rounds({}, 64), 0U);
}

TEST(CopyAround, LeavesTheExceptedBytesAlone) {
  std::array<std::byte, 100> from = {};
  from.fill(std::byte{1});
  std::array<std::byte, 101> to = {};
  copy_around(copy_bytes, to.data(), from.data(), from.size(), {10, 30});
  for (std::size_t at = 0; at < to.size(); ++at)
    EXPECT_EQ(to[at], std::byte{at < 10 || (at >= 30 && at < 100)}) << at;
}

}  // namespace
}  // namespace hvd::segment
