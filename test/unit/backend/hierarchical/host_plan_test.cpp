#include "backend/hierarchical/host_plan.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace hvd::hierarchical {
namespace {

using Hosts = std::vector<std::vector<int>>;

/// One letter per rank of the world.
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

TEST(HostPlan, TheSmallestHostAndTheLimitSayHowManyDrive) {
  EXPECT_EQ(make_plan(on_hosts("aaab"), {0, 1, 2, 3}, 0, 8).drivers, 1);
  EXPECT_FALSE(make_plan(on_hosts("aaab"), {0, 1, 2, 3}, 1, 8).drives());
  EXPECT_EQ(make_plan(on_hosts("aaaabbbb"), {0, 1, 2, 3, 4, 5, 6, 7}, 0, 3).drivers, 3);
  EXPECT_EQ(make_plan(on_hosts("aaabbb"), {0, 1, 2, 4, 5}, 0, 8).drivers, 2);
}

TEST(Slices, CoverEveryByteOnceInWholeLines) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{64}, std::size_t{65},
                                  std::size_t{1000}, std::size_t{262'144}}) {
    for (const int drivers : {1, 2, 3, 7}) {
      std::size_t covered = 0;
      for (int index = 0; index < drivers; ++index) {
        const Range slice = slice_of(bytes, index, drivers);
        EXPECT_EQ(slice.begin, covered) << bytes << " bytes, slice " << index << " of " << drivers;
        if (slice.end != bytes) {
          EXPECT_EQ(slice.end % 64, 0U);
        }
        EXPECT_LE(slice.size(), (bytes / 64 / static_cast<std::size_t>(drivers) + 2) * 64);
        covered = slice.end;
      }
      EXPECT_EQ(covered, bytes);
    }
  }
}

TEST(Rounds, CoverEveryByteOnceAndAreEmptyBehindTheLast) {
  EXPECT_EQ(round_of(150, 0, 64).size(), 64U);
  EXPECT_EQ(round_of(150, 2, 64).begin, 128U);
  EXPECT_EQ(round_of(150, 2, 64).end, 150U);
  EXPECT_TRUE(round_of(150, 3, 64).empty());
  EXPECT_EQ(round_of(150, 9, 64).begin, 150U);
  EXPECT_TRUE(round_of(0, 0, 64).empty());
}

}  // namespace
}  // namespace hvd::hierarchical
