#include "base/rank_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "support/contracts.h"

namespace hvd {
namespace {

using ::testing::ElementsAre;

RankSet set_of(const std::set<int>& ranks) {
  const std::vector<int> list(ranks.begin(), ranks.end());
  return RankSet::of(list);
}

std::set<int> random_set(std::mt19937_64& random) {
  std::set<int> ranks;
  const auto runs = random() % 5;
  for (std::size_t i = 0; i < runs; ++i) {
    const int first = static_cast<int>(random() % 40);
    const int last = first + static_cast<int>(random() % 6);
    for (int rank = first; rank <= last; ++rank) ranks.insert(rank);
  }
  return ranks;
}

TEST(RankSet, NeighboursAreOneRange) {
  RankSet set(3);
  set.add(RankSet(5));
  set.add(RankSet(4));
  EXPECT_THAT(set.ranges(), ElementsAre(RankRange{3, 5}));
  set.remove(RankSet(4));
  EXPECT_THAT(set.ranges(), ElementsAre(RankRange{3, 3}, RankRange{5, 5}));
  EXPECT_EQ(count(set), 2);
  EXPECT_EQ(set.lowest(), 3);
  EXPECT_EQ(set.highest(), 5);
}

TEST(RankSet, BehavesAsASetOfNumbers) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 20000; ++i) {
    const std::set<int> a = random_set(random);
    const std::set<int> b = random_set(random);
    std::set<int> both, rest, all = a;
    for (const int rank : a) (b.contains(rank) ? both : rest).insert(rank);
    all.insert(b.begin(), b.end());
    const RankSet x = set_of(a);
    const RankSet y = set_of(b);
    ASSERT_EQ(x.to_vector(), std::vector<int>(a.begin(), a.end()));
    ASSERT_EQ(count(x), static_cast<int>(a.size()));
    ASSERT_EQ(intersection(x, y), set_of(both));
    ASSERT_EQ(difference(x, y), set_of(rest));
    ASSERT_EQ(intersects(x, y), !both.empty());
    ASSERT_EQ(contains(x, y), both.size() == b.size());
    RankSet sum = x;
    sum.add(y);
    ASSERT_EQ(sum, set_of(all));
    RankSet left = x;
    left.remove(y);
    ASSERT_EQ(left, set_of(rest));
    for (int rank = 0; rank < 50; ++rank) ASSERT_EQ(contains(x, rank), a.contains(rank));
  }
}

TEST(RankMap, BehavesAsAVector) {
  std::mt19937_64 random(8);
  constexpr std::size_t kRanks = 50;
  RankMap<int> map(kRanks);
  std::vector<int> expected(kRanks);
  for (int i = 0; i < 20000; ++i) {
    const std::set<int> ranks = random_set(random);
    const int value = static_cast<int>(random() % 4);
    map.assign(set_of(ranks), value);
    for (const int rank : ranks) expected[static_cast<std::size_t>(rank)] = value;
    std::size_t seen = 0;
    map.for_each(RankSet(0, kRanks - 1), [&](RankRange range, int is) {
      for (int rank = range.first; rank <= range.last; ++rank, ++seen)
        ASSERT_EQ(is, expected[static_cast<std::size_t>(rank)]);
    });
    ASSERT_EQ(seen, kRanks);
    for (std::size_t entry = 1; entry < map.entries().size(); ++entry) {
      ASSERT_NE(map.entries()[entry - 1].value, map.entries()[entry].value);
    }
    ASSERT_EQ(map.at(17), expected[17]);
  }
}

TEST(RankMap, OfNoRanks) { EXPECT_TRUE(RankMap<int>(0).entries().empty()); }

TEST(RankSetDeathTest, AnEmptySetHasNoLowestRank) {
  EXPECT_BROKEN_CONTRACT(static_cast<void>(RankSet().lowest()), "there is a rank");
  EXPECT_BROKEN_CONTRACT(static_cast<void>(RankSet().highest()), "there is a rank");
}

TEST(RankMapDeathTest, ARankHasToExist) {
  const RankMap<int> map(3);
  EXPECT_EQ(map.at(2), 0);
  EXPECT_BROKEN_CONTRACT(static_cast<void>(map.at(3)), "the rank exists");
  EXPECT_BROKEN_CONTRACT(static_cast<void>(map.at(-1)), "the rank exists");
}

}  // namespace
}  // namespace hvd
