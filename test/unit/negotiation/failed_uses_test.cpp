#include "negotiation/failed_uses.h"

#include <gtest/gtest.h>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

RankSet both(const RankSet& a, const RankSet& b) {
  RankSet set = a;
  set.add(b);
  return set;
}

TEST(FailedUses, ARankThatHasNotHeardOfTheErrorMeansTheFailedUse) {
  FailedUses uses;
  EXPECT_TRUE(uses.find(allreduce("a"), RankSet(0, 3), 0).empty());
  uses.add(allreduce("a"), 5, RankSet(1, 2));
  const RankSet all(0, 3);
  EXPECT_EQ(uses.find(allreduce("a"), all, 4), RankSet(1, 2));
  EXPECT_EQ(uses.find(allreduce("a"), RankSet(2), 4), RankSet(2));
  EXPECT_TRUE(uses.find(allreduce("a"), all, 5).empty());
  EXPECT_TRUE(uses.find(allreduce("b"), all, 4).empty());
  wire::Request elsewhere = allreduce("a");
  elsewhere.process_set = 1;
  EXPECT_TRUE(uses.find(elsewhere, all, 4).empty());
}

TEST(FailedUses, OneThatAllHadAskedForConcernsNobody) {
  FailedUses uses;
  uses.add(allreduce("a"), 5, RankSet());
  EXPECT_TRUE(uses.empty());
}

TEST(FailedUses, EachIsKeptUntilItsRanksHaveHeardOfIt) {
  FailedUses uses;
  uses.add(allreduce("a"), 5, RankSet(1));
  uses.add(allreduce("a"), 7, RankSet(1, 2));
  EXPECT_EQ(uses.size(), 3U);
  uses.note_applied(RankSet(0, 2), 4);
  EXPECT_EQ(uses.size(), 3U);
  uses.note_applied(RankSet(1), 6);
  EXPECT_EQ(uses.size(), 2U);
  EXPECT_EQ(uses.find(allreduce("a"), RankSet(0, 3), 4), RankSet(1, 2));
  uses.note_applied(both(RankSet(0), RankSet(2)), 7);
  EXPECT_EQ(uses.find(allreduce("a"), RankSet(0, 3), 6), RankSet(1));
  uses.note_applied(RankSet(1), 7);
  EXPECT_TRUE(uses.empty());
}

TEST(FailedUses, ThoseOfARemovedSetAreForgotten) {
  FailedUses uses;
  wire::Request in_one = allreduce("a");
  in_one.process_set = 1;
  wire::Request in_eleven = allreduce("a");
  in_eleven.process_set = 11;
  uses.add(in_one, 5, RankSet(1));
  uses.add(in_eleven, 5, RankSet(1));
  uses.drop_set(1);
  EXPECT_TRUE(uses.find(in_one, RankSet(1), 0).empty());
  EXPECT_EQ(uses.find(in_eleven, RankSet(1), 0), RankSet(1));
}

}  // namespace
}  // namespace hvd::control
