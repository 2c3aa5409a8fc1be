#include "negotiation/plan_progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hvd/error.h"

namespace hvd::control {
namespace {

using ::testing::HasSubstr;

TEST(PlanProgress, ThePlanThatAllHaveAppliedIsTheLowest) {
  PlanProgress progress(3);
  EXPECT_FALSE(progress.note(RankSet(0), 5));
  EXPECT_FALSE(progress.note(RankSet(2), 3));
  EXPECT_EQ(progress.applied_by_all(), 0U);
  EXPECT_TRUE(progress.note(RankSet(1), 4));
  EXPECT_EQ(progress.applied_by_all(), 3U);
  EXPECT_FALSE(progress.note(RankSet(0, 1), 6));
  EXPECT_EQ(progress.applied_by_all(), 3U);
  EXPECT_TRUE(progress.note(RankSet(2), 6));
  EXPECT_EQ(progress.applied_by_all(), 6U);
}

TEST(PlanProgress, ToldTheSameAgainNothingChanges) {
  PlanProgress progress(2);
  EXPECT_FALSE(progress.note(RankSet(0, 1), 0));
  EXPECT_TRUE(progress.note(RankSet(0, 1), 2));
  EXPECT_FALSE(progress.note(RankSet(0, 1), 2));
  EXPECT_EQ(progress.applied_by_all(), 2U);
}

TEST(PlanProgress, ARankGoesNeitherBackNorBeyondTheLastPlan) {
  PlanProgress progress(3);
  progress.note(RankSet(1), 4);
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
  EXPECT_EQ(error(RankSet(0, 2), 3), "rank 1 says it applied plan 3; expected 4 to 5");
  EXPECT_THAT(error(RankSet(2), 6), HasSubstr("rank 2 says it applied plan 6; expected 0 to 5"));
}

}  // namespace
}  // namespace hvd::control
