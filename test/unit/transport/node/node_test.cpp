#include "transport/node/node.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "hvd/error.h"
#include "mpi/support/hosts.h"
#include "support/join_nodes.h"

namespace hvd::host {
namespace {

using testing::join_nodes;

TEST(Node, RanksOfOneHostRingEachOtherAndCountTheirMail) {
  const auto nodes = join_nodes(3);
  for (int rank = 0; rank < 3; ++rank) {
    Node& node = *nodes[static_cast<std::size_t>(rank)];
    EXPECT_EQ(node.topology().rank, rank);
    EXPECT_EQ(node.topology().local_size, 3);
    EXPECT_TRUE(node.control_segment_shared() && node.all_control_segments_shared() &&
                node.rung_by_all());
    EXPECT_EQ(node.name_prefix(), nodes.front()->name_prefix());
    EXPECT_EQ(node.rank_of_slot(rank), rank);
    EXPECT_NE(node.arrival_flags(2, 0), nullptr);
    EXPECT_EQ(node.remote_arrival_flags(), nullptr) << "there is no other host";
    EXPECT_TRUE(node.inbox_empty());
    EXPECT_FALSE(std::filesystem::exists("/dev/shm" + node.name_prefix()));
  }
  const std::uint32_t before = nodes[2]->control_segment().own_doorbell().ticket();
  nodes[0]->ring(2);
  EXPECT_NE(nodes[2]->control_segment().own_doorbell().ticket(), before);
  nodes[0]->announce(2);
  EXPECT_FALSE(nodes[2]->inbox_empty());
  EXPECT_TRUE(nodes[1]->inbox_empty());
  nodes[2]->count_received();
  EXPECT_TRUE(nodes[2]->inbox_empty());
}

TEST(Node, RanksOfOtherHostsAreOutOfReach) {
  const testing::PretendHosts pretend("aba");
  const auto nodes = join_nodes(3);
  EXPECT_EQ(nodes[0]->topology().host_names, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(nodes[2]->topology().local_rank, 1);
  EXPECT_EQ(nodes[2]->rank_of_slot(1), 2);
  EXPECT_EQ(nodes[0]->name_prefix(), nodes[2]->name_prefix());
  EXPECT_NE(nodes[0]->name_prefix(), nodes[1]->name_prefix());
  EXPECT_EQ(nodes[0]->arrival_flags(1, 0), nullptr);
  EXPECT_NE(nodes[0]->remote_arrival_flags(), nullptr);
  for (const auto& node : nodes) {
    EXPECT_TRUE(node->control_segment_shared() && node->all_control_segments_shared());
    EXPECT_FALSE(node->rung_by_all());
    for (int rank = 0; rank < 3; ++rank) EXPECT_GT(node->shared_memory_free(rank), 0U);
  }
  const std::uint32_t before = nodes[1]->control_segment().own_doorbell().ticket();
  nodes[0]->ring(1);
  nodes[0]->ring(-1);
  nodes[0]->ring(3);
  EXPECT_EQ(nodes[1]->control_segment().own_doorbell().ticket(), before);
  nodes[0]->announce(2);
  EXPECT_EQ(nodes[2]->control_segment().own_message_count(), 0U)
      << "a rank that not all ranks can ring polls, and counts no messages";
}

TEST(Node, OneRankWithoutSharedMemoryMakesItsHostPoll) {
  const testing::PretendHosts pretend("aba");
  const auto nodes = join_nodes(3, 2);
  EXPECT_FALSE(nodes[0]->control_segment_shared());
  EXPECT_TRUE(nodes[1]->control_segment_shared()) << "it is alone on its host";
  for (const auto& node : nodes) {
    EXPECT_FALSE(node->all_control_segments_shared());
    EXPECT_EQ(node->arrival_flags(node->topology().rank, 0), nullptr);
    const std::uint32_t before = node->control_segment().own_doorbell().ticket();
    node->ring(node->topology().rank);
    EXPECT_NE(node->control_segment().own_doorbell().ticket(), before)
        << "a rank can always ring itself";
  }
}

TEST(Node, RemovesAbandonedSegmentFilesAtItsEnd) {
  auto nodes = join_nodes(2);
  const auto file = "/dev/shm/hvd-segment-node-test-" + std::to_string(::getpid());
  std::ofstream(file) << "no process holds its lock";
  nodes[1].reset();
  EXPECT_TRUE(std::filesystem::exists(file)) << "the first rank of the host removes it";
  nodes[0].reset();
  EXPECT_FALSE(std::filesystem::exists(file));
}

TEST(Node, RefusesAMalformedHostList) {
  const testing::PretendHosts pretend("ab");
  testing::Gathering gathering(1);
  EXPECT_THROW(Node::join(0, 1, gathering.of(0)), UsageError);
}

}  // namespace
}  // namespace hvd::host
