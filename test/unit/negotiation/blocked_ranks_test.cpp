#include "negotiation/blocked_ranks.h"

#include <gtest/gtest.h>

namespace hvd::control {
namespace {

using std::chrono::seconds;

TimePoint at(int second) { return TimePoint(seconds(second)); }

class BlockedRanksTest : public ::testing::Test {
 protected:
  BlockedRanksTest() { blocked_.note_change(at(10)); }

  BlockedRanks blocked_{3, seconds(5)};
};

TEST_F(BlockedRanksTest, ADeadlockIsWhenAllAreBlockedForLongEnough) {
  blocked_.add(0);
  blocked_.add(2);
  EXPECT_FALSE(blocked_.deadlocked_for({}, at(100))) << "rank 1 may still ask for something";
  blocked_.add(1);
  EXPECT_FALSE(blocked_.deadlocked_for({}, at(14)));
  EXPECT_EQ(blocked_.deadlocked_for({}, at(15)), seconds(5));
  EXPECT_EQ(blocked_.deadlocked_for({}, at(18)), seconds(8));
}

TEST_F(BlockedRanksTest, AnyChangeGivesAllSomethingToGoOnWith) {
  for (const int rank : {0, 1, 2}) blocked_.add(rank);
  blocked_.note_change(at(12));
  EXPECT_FALSE(blocked_.deadlocked_for({}, at(100)));
  for (const int rank : {0, 1, 2}) blocked_.add(rank);
  EXPECT_FALSE(blocked_.deadlocked_for({}, at(16)));
  EXPECT_EQ(blocked_.deadlocked_for({}, at(17)), seconds(5));
}

TEST_F(BlockedRanksTest, RanksThatHaveLeftAskForNothingEither) {
  EXPECT_FALSE(blocked_.deadlocked_for(RankSet(0, 2), at(100))) << "nobody waits";
  blocked_.add(1);
  EXPECT_FALSE(blocked_.deadlocked_for(RankSet(0), at(100)));
  blocked_.add(2);
  EXPECT_EQ(blocked_.deadlocked_for(RankSet(0), at(100)), seconds(90));
  EXPECT_EQ(blocked_.deadlocked_for(RankSet(0, 1), at(100)), seconds(90));
}

TEST(BlockedRanks, WithoutALimitThereIsNoDeadlock) {
  BlockedRanks blocked(1, Duration::zero());
  blocked.add(0);
  EXPECT_FALSE(blocked.deadlocked_for({}, at(1000)));
}

}  // namespace
}  // namespace hvd::control
