#include "sharded/shard_plan.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hvd::libtorch {
namespace {

TEST(ShardPlan, RowsAreThoseOfAReducescatter) {
  EXPECT_EQ(rows_at(10, 4, 0), (ElementRange{0, 3}));
  EXPECT_EQ(rows_at(10, 4, 1), (ElementRange{3, 6}));
  EXPECT_EQ(rows_at(10, 4, 2), (ElementRange{6, 8}));
  EXPECT_EQ(rows_at(10, 4, 3), (ElementRange{8, 10}));
  EXPECT_EQ(rows_at(2, 4, 3), (ElementRange{2, 2})) << "more ranks than elements";
}

TEST(ShardPlan, OwnersHaveAllAndOthersNothingInTheOrderOfRanks) {
  const ShardUnit unit{.members = {0}, .first = {0}, .elements = 7, .owner = 1};
  EXPECT_EQ(range_of(unit, 3, 0), (ElementRange{0, 0}));
  EXPECT_EQ(range_of(unit, 3, 1), (ElementRange{0, 7}));
  EXPECT_EQ(range_of(unit, 3, 2), (ElementRange{7, 7}));
}

/// Every element of every parameter belongs to exactly one rank, and gaps to no rank.
TEST(ShardPlan, PiecesCoverEachParameterOnce) {
  const std::vector<std::int64_t> sizes{5, 16, 1, 40, 0};
  const ShardUnit unit{.members = {3, 0, 4, 2, 1}, .first = {0, 48, 64, 64, 80}, .elements = 96};
  for (const int ranks : {1, 2, 3, 4, 7, 100}) {
    std::vector<std::vector<int>> covered;
    for (const std::int64_t size : sizes) covered.emplace_back(static_cast<std::size_t>(size), 0);
    for (int rank = 0; rank < ranks; ++rank) {
      const ElementRange own = range_of(unit, ranks, rank);
      for (const ShardPiece& piece : pieces_of(unit, sizes, ranks, rank)) {
        EXPECT_GT(piece.elements.size(), 0);
        EXPECT_GE(piece.place, own.begin);
        EXPECT_LE(piece.place + piece.elements.size(), own.end);
        for (std::int64_t e = piece.elements.begin; e < piece.elements.end; ++e)
          ++covered[piece.parameter][static_cast<std::size_t>(e)];
        std::size_t m = 0;
        while (unit.members[m] != piece.parameter) ++m;
        EXPECT_EQ(piece.place, unit.first[m] + piece.elements.begin);
      }
    }
    for (const auto& parameter : covered) {
      for (const int times : parameter) EXPECT_EQ(times, 1) << ranks << " ranks";
    }
  }
}

TEST(ShardPlan, WholeParametersAreSharedOutByTheirSize) {
  EXPECT_EQ(assign_owners(std::vector<std::size_t>{1, 10, 4, 5, 2}, 2),
            (std::vector<int>{0, 0, 1, 1, 1}));
  EXPECT_EQ(assign_owners(std::vector<std::size_t>{3, 3}, 1), (std::vector<int>{0, 0}));
  EXPECT_TRUE(assign_owners({}, 4).empty());
}

}  // namespace
}  // namespace hvd::libtorch
