#include "negotiation/departures.h"

#include <gtest/gtest.h>

namespace hvd::control {
namespace {

TEST(Departures, TheEndIsTakenOnceWhenAllHaveLeft) {
  Departures departures(3);
  EXPECT_TRUE(departures.none());
  EXPECT_FALSE(departures.take_end());
  departures.add(RankSet(0, 1));
  EXPECT_FALSE(departures.none());
  EXPECT_FALSE(departures.all());
  EXPECT_FALSE(departures.take_end());
  departures.add(RankSet(1));
  EXPECT_FALSE(departures.all()) << "the same rank, told twice";
  departures.add(RankSet(2));
  EXPECT_TRUE(departures.all());
  EXPECT_TRUE(departures.take_end());
  EXPECT_FALSE(departures.take_end());
  EXPECT_TRUE(departures.all());
  EXPECT_EQ(departures.ranks(), RankSet(0, 2));
}

TEST(Departures, KnowsWhichEndedWithoutShutdown) {
  Departures departures(4);
  departures.add(RankSet(1, 3));
  departures.add_ended(RankSet(2));
  EXPECT_FALSE(departures.ended(1));
  EXPECT_TRUE(departures.ended(2));
  EXPECT_FALSE(departures.ended(0));
  EXPECT_EQ(departures.ranks(), RankSet(1, 3));
}

}  // namespace
}  // namespace hvd::control
