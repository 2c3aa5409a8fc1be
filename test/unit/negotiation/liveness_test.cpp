#include "negotiation/liveness.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hvd::control {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TimePoint at(int second) { return TimePoint(seconds(second)); }

class LivenessTest : public ::testing::Test {
 protected:
  Liveness liveness_{{1, 4}, seconds(20)};  // an interval is 5 s
};

TEST_F(LivenessTest, SilenceDoesNotCountWhileThisRankDoesNotWait) {
  for (int second = 0; second < 1000; second += 3) {
    const auto actions = liveness_.check(at(second), false);
    EXPECT_THAT(actions.ping, IsEmpty());
    EXPECT_FALSE(actions.lost);
  }
}

TEST_F(LivenessTest, APeerWithARecentMessageIsNotPinged) {
  liveness_.record_message(1, at(100));
  liveness_.record_message(4, at(98));
  EXPECT_THAT(liveness_.check(at(102), true).ping, IsEmpty());
  EXPECT_THAT(liveness_.check(at(103), true).ping, ElementsAre(4));
  EXPECT_THAT(liveness_.check(at(105), true).ping, ElementsAre(1));
}

TEST_F(LivenessTest, ASilentPeerIsPingedOncePerInterval) {
  EXPECT_THAT(liveness_.check(at(100), true).ping, ElementsAre(1, 4));
  EXPECT_THAT(liveness_.check(at(104), true).ping, IsEmpty());
  EXPECT_THAT(liveness_.check(at(105), true).ping, ElementsAre(1, 4));
}

TEST_F(LivenessTest, APeerThatWasQuietBeforeIsLostATimeoutAfterTheFirstQuestion) {
  for (int second = 100; second < 120; second += 5) {
    liveness_.record_message(4, at(second));
    EXPECT_FALSE(liveness_.check(at(second), true).lost) << second;
  }
  liveness_.record_message(4, at(120));
  EXPECT_EQ(liveness_.check(at(120), true).lost, 1);
}

TEST_F(LivenessTest, APeerWithARecentMessageIsLostATimeoutAfterThat) {
  liveness_.record_message(1, at(100));
  for (const int second : {103, 108, 113, 119}) {
    liveness_.record_message(4, at(second));
    EXPECT_FALSE(liveness_.check(at(second), true).lost) << second;
  }
  EXPECT_EQ(liveness_.check(at(120), true).lost, 1) << "not a timeout after the wait began";
}

TEST_F(LivenessTest, AnAnswerClearsTheQuestion) {
  liveness_.check(at(100), true);
  liveness_.record_message(1, at(119));
  liveness_.record_message(4, at(119));
  EXPECT_FALSE(liveness_.check(at(125), true).lost);
  EXPECT_FALSE(liveness_.check(at(138), true).lost);
  EXPECT_EQ(liveness_.check(at(139), true).lost, 1)
      << "a timeout after its last message, neither earlier nor later";
}

TEST_F(LivenessTest, SilenceBeforeAWaitIsNotHeldAgainstAPeer) {
  liveness_.check(at(100), true);
  liveness_.check(at(110), false);
  EXPECT_FALSE(liveness_.check(at(500), true).lost);
  EXPECT_FALSE(liveness_.check(at(519), true).lost);
  EXPECT_TRUE(liveness_.check(at(520), true).lost);
}

TEST_F(LivenessTest, OthersThanTheWatchedMeanNothing) {
  liveness_.record_message(7, at(100));
  EXPECT_THAT(liveness_.check(at(100), true).ping, ElementsAre(1, 4));
  EXPECT_EQ(liveness_.interval(), Duration(seconds(5)));
}

}  // namespace
}  // namespace hvd::control
