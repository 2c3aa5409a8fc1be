#include "negotiation/tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace hvd::control {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Topology hosts(const std::vector<int>& ranks_per_host, bool cyclic = false) {
  std::vector<std::string> names;
  std::vector<int> left = ranks_per_host;
  for (std::size_t host = 0; host < left.size();) {
    if (!cyclic) {
      while (left[host]-- > 0) names.push_back("host" + std::to_string(host));
      ++host;
      continue;
    }
    bool any = false;
    for (std::size_t turn = 0; turn < left.size(); ++turn) {
      if (left[turn]-- <= 0) continue;
      names.push_back("host" + std::to_string(turn));
      any = true;
    }
    if (!any) break;
  }
  return make_topology(0, names);
}

int depth_of(const std::vector<int>& parents, int rank) {
  int depth = 0;
  for (; parents[static_cast<std::size_t>(rank)] != -1; ++depth) {
    rank = parents[static_cast<std::size_t>(rank)];
    if (depth > static_cast<int>(parents.size())) return -1;
  }
  return rank == 0 ? depth : -1;
}

// @return the depth
int check_tree(const Topology& topology, int radix) {
  const auto parents = tree_parents(topology, radix);
  EXPECT_EQ(parents.size(), static_cast<std::size_t>(topology.size));
  std::vector<int> children(parents.size());
  int deepest = 0;
  for (int rank = 0; rank < topology.size; ++rank) {
    const int depth = depth_of(parents, rank);
    EXPECT_GE(depth, 0) << "rank " << rank << " does not reach rank 0";
    deepest = std::max(deepest, depth);
    const int parent = parents[static_cast<std::size_t>(rank)];
    if (parent < 0) continue;
    ++children[static_cast<std::size_t>(parent)];
    if (topology.same_host(rank, parent)) continue;
    const auto leader = [&](int of) {
      const auto& host = topology.host_of_rank;
      return std::find(host.begin(), host.end(), host[static_cast<std::size_t>(of)]) -
                 host.begin() ==
             of;
    };
    EXPECT_TRUE(leader(rank) && leader(parent))
        << rank << " below " << parent << " of another host";
  }
  EXPECT_LE(*std::max_element(children.begin(), children.end()), radix);
  return deepest;
}

TEST(Tree, SmallJobsAndSingleHostsHaveNone) {
  EXPECT_FALSE(needs_tree(hosts({1}), 32));
  EXPECT_FALSE(needs_tree(hosts({1, 1}), 32));
  EXPECT_FALSE(needs_tree(hosts({200}), 32));
  EXPECT_FALSE(needs_tree(hosts({16, 17}), 32));
  EXPECT_TRUE(needs_tree(hosts({17, 17}), 32));
  EXPECT_TRUE(needs_tree(hosts({2, 2}), 2));
  EXPECT_FALSE(needs_tree(hosts({17, 17}), 0));
}

TEST(Tree, EveryRankReachesRankZeroAndNoRankHasTooManyChildren) {
  EXPECT_EQ(check_tree(hosts({1}), 32), 0);
  EXPECT_EQ(check_tree(hosts({1, 1}), 32), 1);
  EXPECT_EQ(check_tree(hosts(std::vector<int>(33, 1)), 32), 1);
  EXPECT_EQ(check_tree(hosts(std::vector<int>(34, 1)), 32), 2);
  EXPECT_EQ(check_tree(hosts(std::vector<int>(1025, 1)), 32), 2);
  EXPECT_EQ(check_tree(hosts(std::vector<int>(1058, 1)), 32), 3);
  EXPECT_EQ(check_tree(hosts(std::vector<int>(2048, 8)), 32), 4);
  EXPECT_EQ(check_tree(hosts(std::vector<int>(2048, 8), true), 32), 4);
  EXPECT_EQ(check_tree(hosts(std::vector<int>(128, 128)), 32), 4);
  check_tree(hosts({1, 100, 3, 64, 1, 1, 17}), 32);
  check_tree(hosts({1, 100, 3, 64, 1, 1, 17}, true), 32);
  for (const int radix : {2, 3, 5}) {
    check_tree(hosts({1, 1, 1}), radix);
    check_tree(hosts({7, 1, 3, 2, 9}), radix);
    check_tree(hosts({7, 1, 3, 2, 9}, true), radix);
  }
}

TEST(Tree, PlacesFitTogether) {
  const Topology topology = hosts({7, 1, 3, 2, 9}, true);
  const auto parents = tree_parents(topology, 3);
  for (int rank = 0; rank < topology.size; ++rank) {
    const TreePlace place = place_in_tree(topology, rank, 3);
    EXPECT_EQ(place.parent, parents[static_cast<std::size_t>(rank)]);
    RankSet below(rank);
    for (const int child : place.children) {
      EXPECT_EQ(parents[static_cast<std::size_t>(child)], rank);
      const RankSet subtree = place_in_tree(topology, child, 3).subtree;
      EXPECT_FALSE(intersects(below, subtree));
      below.add(subtree);
    }
    EXPECT_EQ(below, place.subtree);
  }
  EXPECT_EQ(count(place_in_tree(topology, 0, 3).subtree), topology.size);
}

TEST(Tree, OfThreeHosts) {
  const Topology topology = hosts({3, 3, 1});
  EXPECT_THAT(tree_parents(topology, 2), ElementsAre(-1, 0, 1, 0, 3, 4, 3));
  EXPECT_THAT(place_in_tree(topology, 3, 2).children, ElementsAre(4, 6));
  EXPECT_THAT(place_in_tree(topology, 2, 2).children, IsEmpty());
}

}  // namespace
}  // namespace hvd::control
