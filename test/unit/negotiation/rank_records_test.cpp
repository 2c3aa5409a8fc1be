#include "negotiation/rank_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hvd/error.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;

TEST(PlanProgress, ThePlanThatAllHaveAppliedIsTheLowest) {
  PlanProgress progress(3);
  EXPECT_FALSE(progress.record(RankSet(0, 2), 0));
  EXPECT_FALSE(progress.record(RankSet(0), 5));
  EXPECT_FALSE(progress.record(RankSet(2), 3));
  EXPECT_EQ(progress.applied_by_all(), 0U);
  EXPECT_TRUE(progress.record(RankSet(1), 4));
  EXPECT_EQ(progress.applied_by_all(), 3U);
  EXPECT_FALSE(progress.record(RankSet(0, 1), 6));
  EXPECT_EQ(progress.applied_by_all(), 3U);
  EXPECT_TRUE(progress.record(RankSet(2), 6));
  EXPECT_FALSE(progress.record(RankSet(0, 2), 6)) << "the same again";
  EXPECT_EQ(progress.applied_by_all(), 6U);
}

TEST(PlanProgress, ARankGoesNeitherBackNorBeyondTheLastPlan) {
  PlanProgress progress(3);
  progress.record(RankSet(1), 4);
  EXPECT_NO_THROW(progress.check(RankSet(0, 2), 4, 5));
  EXPECT_NO_THROW(progress.check(RankSet(0), 0, 5));
  const auto error = [&](const RankSet& ranks, std::uint64_t sequence) {
    try {
      progress.check(ranks, sequence, 5);
    } catch (const Error& refused) {
      return std::string(refused.what());
    }
    return std::string();
  };
  EXPECT_EQ(error(RankSet(0, 2), 3), "rank 1 reports that it applied plan 3; expected 4 to 5");
  EXPECT_THAT(error(RankSet(2), 6), HasSubstr("rank 2 reports that it applied plan 6; expected 0"));
}

TEST(FailedUses, ARequestFromBeforeTheErrorBelongsToTheFailedUse) {
  FailedUses uses;
  const RankSet all(0, 3);
  EXPECT_TRUE(uses.find(allreduce("a"), all, 0).empty());
  uses.add(allreduce("a"), 5, RankSet());
  EXPECT_TRUE(uses.empty()) << "every member had submitted it";
  uses.add(allreduce("a"), 5, RankSet(1, 2));
  EXPECT_EQ(uses.find(allreduce("a"), all, 4), RankSet(1, 2));
  EXPECT_EQ(uses.find(allreduce("a"), RankSet(2), 4), RankSet(2));
  EXPECT_TRUE(uses.find(allreduce("a"), all, 5).empty());
  EXPECT_TRUE(uses.find(allreduce("b"), all, 4).empty());
  wire::Request elsewhere = allreduce("a");
  elsewhere.process_set = 1;
  EXPECT_TRUE(uses.find(elsewhere, all, 4).empty());
}

TEST(FailedUses, EachIsKeptUntilItsRanksHaveAppliedTheError) {
  FailedUses uses;
  uses.add(allreduce("a"), 5, RankSet(1));
  uses.add(allreduce("a"), 7, RankSet(1, 2));
  uses.record_applied(RankSet(0, 2), 4);
  EXPECT_EQ(uses.size(), 3U);
  uses.record_applied(RankSet(1), 6);
  EXPECT_EQ(uses.size(), 2U);
  EXPECT_EQ(uses.find(allreduce("a"), RankSet(0, 3), 4), RankSet(1, 2));
  uses.record_applied(RankSet(2), 7);
  EXPECT_EQ(uses.find(allreduce("a"), RankSet(0, 3), 6), RankSet(1));
  uses.record_applied(RankSet(1), 7);
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

class BlockedRanksTest : public ::testing::Test {
 protected:
  BlockedRanksTest() { blocked_.record_change(at(10)); }
  static TimePoint at(int second) { return TimePoint(seconds(second)); }

  BlockedRanks blocked_{3, seconds(5)};
};

TEST_F(BlockedRanksTest, ADeadlockIsWhenAllAreBlockedForLongEnough) {
  blocked_.add(0);
  blocked_.add(2);
  EXPECT_FALSE(blocked_.deadlocked_for({}, at(100))) << "rank 1 may still submit an operation";
  EXPECT_EQ(blocked_.deadlocked_for(RankSet(1), at(100)), seconds(90)) << "rank 1 has left";
  blocked_.add(1);
  EXPECT_FALSE(blocked_.deadlocked_for({}, at(14)));
  EXPECT_EQ(blocked_.deadlocked_for({}, at(15)), seconds(5));
  blocked_.record_change(at(18));
  EXPECT_FALSE(blocked_.deadlocked_for({}, at(100))) << "no rank counts as blocked any more";
  for (const int rank : {0, 1, 2}) blocked_.add(rank);
  EXPECT_FALSE(blocked_.deadlocked_for({}, at(22)));
  EXPECT_EQ(blocked_.deadlocked_for({}, at(23)), seconds(5));
}

TEST_F(BlockedRanksTest, ThereIsNoDeadlockWithoutAWaitingRankOrWithoutALimit) {
  EXPECT_FALSE(blocked_.deadlocked_for(RankSet(0, 2), at(100)));
  BlockedRanks without_limit(1, Duration::zero());
  without_limit.add(0);
  EXPECT_FALSE(without_limit.deadlocked_for({}, at(1000)));
}

TEST(Departures, TheEndIsAnnouncedOnceWhenAllHaveLeft) {
  Departures departures(3);
  EXPECT_TRUE(departures.none());
  departures.add(RankSet(0, 1));
  departures.add(RankSet(1));
  departures.add_ended(RankSet(1));
  EXPECT_FALSE(departures.none());
  EXPECT_FALSE(departures.announce_end());
  EXPECT_FALSE(departures.ended(0));
  EXPECT_TRUE(departures.ended(1));
  departures.add(RankSet(2));
  EXPECT_TRUE(departures.announce_end());
  EXPECT_FALSE(departures.announce_end());
  EXPECT_TRUE(departures.all());
  EXPECT_EQ(departures.ranks(), RankSet(0, 2));
}

}  // namespace
}  // namespace hvd::control
