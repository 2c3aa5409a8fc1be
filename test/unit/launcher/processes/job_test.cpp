#include "processes/job.h"

#include <gtest/gtest.h>

#include <string>

namespace hvd::launcher {
namespace {

RankLocation location(const std::string& host, int local_rank, const std::string& from) {
  return {.host = host, .local_rank = local_rank, .address = from};
}

TEST(StartPlan, OneHostUsesTheAddressOfHvdrun) {
  std::vector<RankLocation> locations = {location("a", 0, "127.0.0.1"),
                                         location("a", 1, "127.0.0.1")};
  locations[0].master_port = 4001;
  for (const StartOrder& order : plan_starts(locations)) {
    EXPECT_EQ(order.address, "");
    EXPECT_EQ(order.master_port, 4001);
    EXPECT_EQ(order.nodes, 1);
    EXPECT_EQ(order.node, 0);
    EXPECT_EQ(order.cross_rank, 0);
    EXPECT_EQ(order.cross_size, 1);
    EXPECT_EQ(order.peer, "") << "there is no other host";
  }
}

TEST(StartPlan, RankZeroElsewhereHasTheAddressOfItsConnection) {
  const auto orders = plan_starts({location("b", 0, "10.0.0.2"), location("a", 0, "127.0.0.1")});
  EXPECT_EQ(orders[0].address, "10.0.0.2");
  EXPECT_EQ(orders[1].address, "10.0.0.2");
}

TEST(StartPlan, UnevenHosts) {
  const auto orders = plan_starts({location("a", 0, "127.0.0.1"), location("b", 0, "10.0.0.2"),
                                   location("b", 1, "10.0.0.2"), location("c", 0, "10.0.0.3"),
                                   location("c", 1, "10.0.0.3")});
  const std::vector<int> nodes = {0, 1, 1, 2, 2}, ranks = {0, 1, 0, 2, 1}, sizes = {3, 3, 2, 3, 2};
  const std::vector<std::string> places_of_peers = {"10.0.0.2", "10.0.0.3", "10.0.0.3", "10.0.0.2",
                                                    "10.0.0.2"};
  for (std::size_t i = 0; i < orders.size(); ++i) {
    EXPECT_EQ(orders[i].address, "");
    EXPECT_EQ(orders[i].nodes, 3);
    EXPECT_EQ(orders[i].node, nodes[i]);
    EXPECT_EQ(orders[i].cross_rank, ranks[i]);
    EXPECT_EQ(orders[i].cross_size, sizes[i]);
    EXPECT_EQ(orders[i].peer, places_of_peers[i]);
  }
}

}  // namespace
}  // namespace hvd::launcher
