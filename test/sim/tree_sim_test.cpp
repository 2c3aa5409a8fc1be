// The cost of an aggregation tree for rank 0, in messages and accepted items: exact counts, no
// times.
#include <gtest/gtest.h>

#include "support/uniform_world.h"

namespace hvd::sim {
namespace {

constexpr int kRadix = 32;
constexpr std::size_t kTensors = 161;

void expect_cheap(const testing::UniformWorld::Round& round) {
  EXPECT_LE(round.max_received, 33u);
  EXPECT_LE(round.root_received, 33u);
  EXPECT_LE(round.max_sent_down, 32u);
  EXPECT_EQ(round.items_accepted, kTensors);
  EXPECT_LE(round.ranges_accepted, 2u);
}

class TreeWorldTest : public ::testing::TestWithParam<std::pair<int, int>> {};

TEST_P(TreeWorldTest, NoRankReceivesMoreThan33MessagesARound) {
  const auto [ranks, per_host] = GetParam();
  testing::UniformWorld world(ranks, per_host, kRadix, kTensors);
  testing::UniformWorld small(64, 1, kRadix, kTensors);
  for (int i = 0; i < 3; ++i) {
    const testing::UniformWorld::Round round = world.round();
    expect_cheap(round);
    EXPECT_EQ(round.plan, small.round().plan);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, TreeWorldTest,
                         ::testing::Values(std::pair(34, 1), std::pair(1025, 1), std::pair(1024, 8),
                                           std::pair(4096, 64), std::pair(16384, 8)),
                         [](const auto& size) {
                           return std::to_string(size.param.first) + "RanksBy" +
                                  std::to_string(size.param.second);
                         });

}  // namespace
}  // namespace hvd::sim
