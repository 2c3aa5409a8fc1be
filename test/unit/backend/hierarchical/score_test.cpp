// The sets of ranks that the backend serves.
#include <gtest/gtest.h>

#include <ctime>
#include <numeric>
#include <string>
#include <vector>

#include "backend/hierarchical/hierarchical_backend.h"

namespace hvd::hierarchical {
namespace {

/// @param host_of_rank indices of hosts
Topology topology_of(std::vector<int> host_of_rank, int hosts) {
  Topology topology{.rank = 0, .size = static_cast<int>(host_of_rank.size())};
  for (int host = 0; host < hosts; ++host)
    topology.host_names.push_back("h" + std::to_string(host));
  topology.host_of_rank = std::move(host_of_rank);
  return topology;
}

TEST(HierarchicalScore, ServesSetsOnSeveralHostsWithMembersThatShareAHost) {
  const HierarchicalBackend backend(nullptr, nullptr);
  const Topology topology = topology_of({0, 1, 0, 1, 2}, 3);
  const auto fits = [&](std::vector<int> ranks) {
    return backend.score(topology, {.ranks = std::move(ranks)}, {}) > 0;
  };
  EXPECT_TRUE(fits({0, 1, 2, 3, 4}));
  EXPECT_TRUE(fits({0, 2, 4}));
  EXPECT_TRUE(fits({1, 3, 4}));
  EXPECT_FALSE(fits({0, 2})) << "one host";
  EXPECT_FALSE(fits({0, 1, 4})) << "one member on each host";
  EXPECT_FALSE(fits({3}));
}

// score() is called for every negotiated batch.
TEST(HierarchicalScore, TakesTimeInProportionToTheMembers) {
  constexpr int kMembers = 4096;
  const HierarchicalBackend backend(nullptr, nullptr);
  std::vector<int> each(kMembers);
  std::iota(each.begin(), each.end(), 0);
  const Topology topology = topology_of(each, kMembers);
  const ChannelSpec spec{.ranks = each};
  const std::clock_t begin = std::clock();
  for (int batch = 0; batch < 2000; ++batch) EXPECT_EQ(backend.score(topology, spec, {}), 0);
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, 5.0) << "CPU time of this process; with a loop over pairs of members it would "
                             "be minutes in this build";
}

}  // namespace
}  // namespace hvd::hierarchical
