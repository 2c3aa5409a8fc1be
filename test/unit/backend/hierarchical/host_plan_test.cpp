#include "backend/hierarchical/host_plan.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace hvd::hierarchical {
namespace {

using Hosts = std::vector<std::vector<int>>;

/// Makes a topology. The string has one letter per rank of the world, the name of its host.
Topology on_hosts(const std::string& letters) {
  std::vector<std::string> names;
  for (const char letter : letters) names.emplace_back(1, letter);
  return make_topology(0, names);
}

TEST(HostPlan, GroupsTheMembersOfASetByHost) {
  const HostPlan plan = make_plan(on_hosts("aaabbb"), {1, 2, 3, 5}, 3, 8);
  EXPECT_EQ(plan.hosts, (Hosts{{0, 1}, {2, 3}}));
  EXPECT_EQ(plan.host, 1);
  EXPECT_EQ(plan.index, 1);
  EXPECT_EQ(plan.drivers, 2);
  EXPECT_TRUE(plan.drives());
  EXPECT_EQ(plan.member(0, 1), 1);
  EXPECT_EQ(plan.first_position(0), 0);
  EXPECT_EQ(plan.first_position(1), 2);
  EXPECT_EQ(plan.host_of(2), 1);
}

TEST(HostPlan, OrdersHostsByTheirFirstMemberAndNotByTheirFirstRank) {
  const HostPlan plan = make_plan(on_hosts("abab"), {1, 2, 3}, 0, 8);
  EXPECT_EQ(plan.hosts, (Hosts{{0, 2}, {1}}));
  EXPECT_EQ(plan.host, 0);
  EXPECT_EQ(plan.first_position(1), 2);
  EXPECT_EQ(plan.host_of(2), 0);
  EXPECT_EQ(plan.host_of(1), 1);
}

TEST(HostPlan, TheSmallestHostAndTheLimitBoundTheDrivers) {
  EXPECT_EQ(make_plan(on_hosts("aaab"), {0, 1, 2, 3}, 0, 8).drivers, 1);
  EXPECT_FALSE(make_plan(on_hosts("aaab"), {0, 1, 2, 3}, 1, 8).drives());
  EXPECT_EQ(make_plan(on_hosts("aaaabbbb"), {0, 1, 2, 3, 4, 5, 6, 7}, 0, 3).drivers, 3);
  EXPECT_EQ(make_plan(on_hosts("aaabbb"), {0, 1, 2, 4, 5}, 0, 8).drivers, 2);
}

}  // namespace
}  // namespace hvd::hierarchical
