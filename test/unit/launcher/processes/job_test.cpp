#include "processes/job.h"

#include <gtest/gtest.h>

#include <string>

namespace hvd::launcher {
namespace {

Hello hello_from(const std::string& host, int local_rank, const std::string& from) {
  Hello hello;
  hello.host = host;
  hello.local_rank = local_rank;
  hello.peer_address = from;
  return hello;
}

TEST(StartPlan, OneHostUsesTheAddressOfHvdrun) {
  std::vector<Hello> hellos = {hello_from("a", 0, "127.0.0.1"), hello_from("a", 1, "127.0.0.1")};
  hellos[0].master_port = 4001;
  for (const StartOrder& order : plan_starts(hellos)) {
    EXPECT_EQ(order.address, "");
    EXPECT_EQ(order.master_port, 4001);
    EXPECT_EQ(order.nodes, 1);
    EXPECT_EQ(order.node, 0);
    EXPECT_EQ(order.cross_rank, 0);
    EXPECT_EQ(order.cross_size, 1);
  }
}

TEST(StartPlan, RankZeroElsewhereHasTheAddressOfItsConnection) {
  const auto orders =
      plan_starts({hello_from("b", 0, "10.0.0.2"), hello_from("a", 0, "127.0.0.1")});
  EXPECT_EQ(orders[0].address, "10.0.0.2");
  EXPECT_EQ(orders[1].address, "10.0.0.2");
}

TEST(StartPlan, UnevenHosts) {
  const auto orders = plan_starts({hello_from("a", 0, "127.0.0.1"), hello_from("b", 0, "10.0.0.2"),
                                   hello_from("b", 1, "10.0.0.2"), hello_from("c", 0, "10.0.0.3"),
                                   hello_from("c", 1, "10.0.0.3")});
  const std::vector<int> nodes = {0, 1, 1, 2, 2}, ranks = {0, 1, 0, 2, 1}, sizes = {3, 3, 2, 3, 2};
  for (std::size_t i = 0; i < orders.size(); ++i) {
    EXPECT_EQ(orders[i].address, "");
    EXPECT_EQ(orders[i].nodes, 3);
    EXPECT_EQ(orders[i].node, nodes[i]);
    EXPECT_EQ(orders[i].cross_rank, ranks[i]);
    EXPECT_EQ(orders[i].cross_size, sizes[i]);
  }
}

}  // namespace
}  // namespace hvd::launcher
