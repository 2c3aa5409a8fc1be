#include "agent/core_share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace hvd::launcher {
namespace {

using Cpus = std::vector<int>;

std::vector<Core> machine(const std::string& description, const Cpus& allowed = {}) {
  return usable_cores(allowed, description);
}

TEST(UsableCores, OfASyntheticMachine) {
  const auto cores = machine("numa:2 core:2 pu:2");
  ASSERT_EQ(cores.size(), 4U);
  EXPECT_EQ(cores[0], (Core{0, {0, 1}}));
  EXPECT_EQ(cores[3], (Core{1, {6, 7}}));
}

TEST(UsableCores, StayWithinTheMask) {
  const auto cores = machine("numa:2 core:2 pu:2", {1, 4, 5});
  ASSERT_EQ(cores.size(), 2U);
  EXPECT_EQ(cores[0], (Core{0, {1}}));
  EXPECT_EQ(cores[1], (Core{1, {4, 5}}));
}

TEST(UsableCores, NodesWhoseCoresAlternate) {
  // Hardware threads 0 and 2 belong to the first node, because the numbers alternate between nodes.
  const auto cores = machine("numa:2 core:2 pu:1(indexes=0,2,1,3)");
  ASSERT_EQ(cores.size(), 4U);
  EXPECT_EQ(cores[0].cpus, Cpus{0});
  EXPECT_EQ(cores[1].cpus, Cpus{2});
  EXPECT_EQ(share_of(cores, 1, 2, {}).cpus, (Cpus{1, 3}));
}

TEST(UsableCores, OfThisMachine) {
  const auto cores = usable_cores(allowed_cpus());
  ASSERT_FALSE(cores.empty());
  EXPECT_FALSE(allowed_cpus().empty());
}

TEST(UsableCores, WithoutHwlocsHelp) {
  EXPECT_TRUE(machine("nonsense").empty());
  EXPECT_EQ(machine("nonsense", {3, 5}), (std::vector<Core>{{0, {3}}, {0, {5}}}));
}

TEST(ShareOf, EqualAndSideBySide) {
  const auto cores = machine("numa:1 core:8 pu:1");
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    Cpus all;
    for (int rank = 0; rank < ranks; ++rank) {
      const CoreShare share = share_of(cores, rank, ranks, {});
      ASSERT_EQ(static_cast<int>(share.cpus.size()), 8 / ranks) << ranks;
      EXPECT_EQ(share.threads, 8 / ranks);
      EXPECT_EQ(share.cpus.back() - share.cpus.front() + 1, 8 / ranks) << "side by side";
      all.insert(all.end(), share.cpus.begin(), share.cpus.end());
    }
    std::sort(all.begin(), all.end());
    EXPECT_EQ(std::unique(all.begin(), all.end()), all.end()) << "no core twice";
  }
}

TEST(ShareOf, BothThreadsOfACoreAndOneThreadOfThePool) {
  const CoreShare share = share_of(machine("numa:1 core:4 pu:2"), 1, 2, {});
  EXPECT_EQ(share.cpus, (Cpus{4, 5, 6, 7}));
  EXPECT_EQ(share.threads, 2);
}

TEST(ShareOf, WithinOneNodeWhereItFits) {
  // Three ranks of two cores each do not fit into two nodes of three cores.
  const auto six = machine("numa:2 core:3 pu:1");
  EXPECT_EQ(share_of(six, 0, 2, {}).cpus, (Cpus{0, 1, 2}));
  EXPECT_EQ(share_of(six, 1, 2, {}).cpus, (Cpus{3, 4, 5}));
  EXPECT_EQ(share_of(six, 1, 3, {}).cpus, (Cpus{2, 3}))
      << "whole shares do not fit into the nodes, so this one spans both";
  const auto ten = machine("numa:2 core:5 pu:1");
  EXPECT_EQ(share_of(ten, 1, 4, {}).cpus, (Cpus{2, 3}));
  EXPECT_EQ(share_of(ten, 2, 4, {}).cpus, (Cpus{5, 6})) << "core 4 stays free";
}

TEST(ShareOf, MoreRanksThanCoresAreNotBound) {
  const CoreShare share = share_of(machine("numa:1 core:2 pu:2"), 2, 3, {});
  EXPECT_TRUE(share.cpus.empty());
  EXPECT_EQ(share.threads, 1);
}

TEST(ShareOf, AQuotaSetsTheThreadsAlone) {
  const auto cores = machine("numa:1 core:8 pu:1");
  CoreShare share = share_of(cores, 0, 2, 5.0);
  EXPECT_TRUE(share.cpus.empty());
  EXPECT_EQ(share.threads, 2);
  EXPECT_EQ(share_of(cores, 0, 2, 0.5).threads, 1);
  EXPECT_EQ(share_of(machine("numa:1 core:4 pu:2"), 0, 2, 6.0).threads, 2) << "no more than cores";
  share = share_of(cores, 0, 2, 8.0);
  EXPECT_EQ(share.cpus.size(), 4U) << "a quota of all CPUs is no limit";
}

TEST(ShareOf, ARankBeyondTheHostsIsNotBound) {
  EXPECT_TRUE(share_of(machine("numa:1 core:4 pu:1"), 5, 2, {}).cpus.empty());
}

TEST(PlacedShare, OneCoreEach) {
  const auto cores = machine("numa:2 core:2 pu:2");
  EXPECT_EQ(placed_share(Bind::kCore, cores, 0, 3).cpus, (Cpus{0, 1}));
  EXPECT_EQ(placed_share(Bind::kCore, cores, 2, 3).cpus, (Cpus{4, 5}));
  EXPECT_EQ(placed_share(Bind::kCore, cores, 2, 3).threads, 1);
}

TEST(PlacedShare, OneNodeEach) {
  const auto cores = machine("numa:2 core:2 pu:1");
  for (int rank = 0; rank < 4; ++rank) {
    const CoreShare share = placed_share(Bind::kNuma, cores, rank, 4);
    EXPECT_EQ(share.cpus, rank < 2 ? (Cpus{0, 1}) : (Cpus{2, 3}));
    EXPECT_EQ(share.threads, 1);
  }
  EXPECT_EQ(placed_share(Bind::kNuma, cores, 1, 2).cpus, (Cpus{2, 3}));
  EXPECT_EQ(placed_share(Bind::kNuma, cores, 1, 2).threads, 2);
}

TEST(PlacedShare, MoreRanksThanCoresAreNotBound) {
  const auto cores = machine("core:2 pu:1");
  for (const Bind bind : {Bind::kCore, Bind::kNuma}) {
    EXPECT_TRUE(placed_share(bind, cores, 2, 3).cpus.empty());
    EXPECT_EQ(placed_share(bind, cores, 2, 3).threads, 1);
  }
}

}  // namespace
}  // namespace hvd::launcher
