#include "command/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace hvd::launcher {
namespace {

using ::testing::ElementsAre;

TEST(Placement, WithoutHostsAllRanksAreHere) {
  EXPECT_THAT(place_ranks(3, {}, "me"), ElementsAre(HostRanks{"me", true, {0, 1, 2}}));
}

TEST(Placement, FillsOneHostBeforeTheNext) {
  EXPECT_THAT(place_ranks(3, {{"a", 2}, {"b", 2}, {"c", 2}}, "me"),
              ElementsAre(HostRanks{"a", false, {0, 1}}, HostRanks{"b", false, {2}}));
}

TEST(Placement, NamesOfThisMachineAreOneHost) {
  EXPECT_THAT(place_ranks(4, {{"localhost", 1}, {"b", 1}, {"me", 2}}, "me.example.org"),
              ElementsAre(HostRanks{"localhost", true, {0, 2, 3}}, HostRanks{"b", false, {1}}));
}

}  // namespace
}  // namespace hvd::launcher
