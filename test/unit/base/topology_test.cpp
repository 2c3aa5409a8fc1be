#include "base/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hvd/error.h"

namespace hvd {
namespace {

using ::testing::ElementsAre;

TEST(Topology, OneRank) {
  const Topology topology = make_topology(0, {"alone"});
  EXPECT_EQ(topology.size, 1);
  EXPECT_EQ(topology.local_size, 1);
  EXPECT_EQ(topology.cross_size, 1);
  EXPECT_TRUE(topology.homogeneous);
  EXPECT_EQ(topology.host_name(0), "alone");
}

TEST(Topology, RanksPlacedByNode) {
  const std::vector<std::string> hosts = {"b", "b", "a", "a"};
  const Topology topology = make_topology(3, hosts);
  EXPECT_EQ(topology.rank, 3);
  EXPECT_EQ(topology.size, 4);
  EXPECT_EQ(topology.local_rank, 1);
  EXPECT_EQ(topology.local_size, 2);
  EXPECT_EQ(topology.cross_rank, 1);
  EXPECT_EQ(topology.cross_size, 2);
  EXPECT_TRUE(topology.homogeneous);
  EXPECT_THAT(topology.host_names, ElementsAre("b", "a"));
  EXPECT_THAT(topology.host_of_rank, ElementsAre(0, 0, 1, 1));
  EXPECT_TRUE(topology.same_host(2, 3));
  EXPECT_FALSE(topology.same_host(1, 2));
}

TEST(Topology, RanksPlacedRoundRobinOnUnequalHosts) {
  // a: 0 2 4, b: 1 3, c: 5
  const std::vector<std::string> hosts = {"a", "b", "a", "b", "a", "c"};
  const struct {
    int local_rank, local_size, cross_rank, cross_size;
  } expected[] = {{0, 3, 0, 3}, {0, 2, 1, 3}, {1, 3, 0, 2},
                  {1, 2, 1, 2}, {2, 3, 0, 1}, {0, 1, 2, 3}};
  for (int rank = 0; rank < 6; ++rank) {
    const Topology topology = make_topology(rank, hosts);
    EXPECT_EQ(topology.local_rank, expected[rank].local_rank) << rank;
    EXPECT_EQ(topology.local_size, expected[rank].local_size) << rank;
    EXPECT_EQ(topology.cross_rank, expected[rank].cross_rank) << rank;
    EXPECT_EQ(topology.cross_size, expected[rank].cross_size) << rank;
    EXPECT_FALSE(topology.homogeneous) << rank;
  }
}

TEST(Topology, RefusesARankOutsideTheJob) {
  EXPECT_THROW(make_topology(2, {"a", "a"}), Error);
  EXPECT_THROW(make_topology(-1, {"a"}), Error);
  EXPECT_THROW(make_topology(0, {}), Error);
}

}  // namespace
}  // namespace hvd
