#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "backend/hierarchical/hierarchical_backend.h"
#include "hvd/error.h"
#include "mpi/support/hosts.h"
#include "support/fake_carrier.h"
#include "support/fakes.h"
#include "support/join_nodes.h"
#include "support/reference.h"

// Messages are received into the segment of a host. So the carrier decides whether the segment is
// unmapped when a collective is dropped.

namespace hvd::hierarchical {
namespace {

using message::MemoryRelease;
using testing::Bytes;
using testing::FakeNetwork;

/// Two ranks of one host begin an allreduce with a third rank on another host, which never takes
/// part.
class CancelledMessages : public ::testing::Test {
 protected:
  CancelledMessages() {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      peers.push_back(std::make_unique<testing::FakePeers>(
          static_cast<int>(rank), 3, [node = nodes[rank]](int other) { node->ring(other); }));
      HierarchicalBackend backend(network->carrier(static_cast<int>(rank)), nodes[rank]);
      channels.push_back(
          backend.open({.ranks = {0, 1, 2}, .set_rank = static_cast<int>(rank)}, *peers.back()));
    }
    for (auto& channel : channels) {
      works.push_back(channel->launch({.kind = OpKind::kAllreduce, .count = 250'000}, in, out));
    }
    for (int pass = 0; pass < 10; ++pass) {
      for (auto& work : works) EXPECT_FALSE(work->progress());
    }
    EXPECT_EQ(mappings(), 2) << "one per rank";
    EXPECT_GT(network->sent(), 0);
  }
  /// Counts the mappings of the segment's file. The creator may have mapped it before it had a
  /// name.
  int mappings() {
    std::ifstream maps("/proc/self/maps");
    std::vector<std::string> files;
    std::string range, access, offset, device, inode, name;
    for (std::string line; std::getline(maps, line);) {
      name.clear();
      std::istringstream(line) >> range >> access >> offset >> device >> inode >> name;
      files.push_back(device + " " + inode);
      if (name.find(nodes[0]->name_prefix() + "-hosts-0") != std::string::npos) file = files.back();
    }
    return static_cast<int>(std::count(files.begin(), files.end(), file));
  }
  void drop(std::size_t rank) {
    channels[rank]->abort();
    works[rank].reset();
    channels[rank].reset();
  }

  const testing::PretendHosts pretend{"aab"};
  const std::shared_ptr<FakeNetwork> network = FakeNetwork::create(3);
  const std::vector<std::shared_ptr<host::Node>> nodes = testing::join_nodes(3);
  const Bytes in = Bytes(1'000'000);
  Bytes out = Bytes(1'000'000);
  std::vector<std::unique_ptr<testing::FakePeers>> peers;
  std::vector<std::unique_ptr<Channel>> channels;
  std::vector<std::unique_ptr<Work>> works;
  std::string file = "none";
};

TEST_F(CancelledMessages, ASegmentThatTheCarrierReleasesIsUnmapped) {
  drop(0);
  EXPECT_EQ(mappings(), 1);
  drop(1);
  EXPECT_EQ(mappings(), 0);
}

TEST_F(CancelledMessages, ASegmentThatTheCarrierReleasesLateIsUnmappedWithTheChannel) {
  network->pending_cancels = 4;
  channels[0]->abort();
  works[0].reset();
  EXPECT_EQ(mappings(), 2);
  channels[0].reset();
  EXPECT_EQ(mappings(), 1);
}

TEST_F(CancelledMessages, ASegmentThatTheCarrierNeverReleasesStaysMapped) {
  network->cancel_result = MemoryRelease::kNever;
  drop(0);
  EXPECT_EQ(mappings(), 2);
}

TEST_F(CancelledMessages, AWorkThatIsDroppedWithoutAbortEndsTheChannelToo) {
  network->cancel_result = MemoryRelease::kNever;
  works[0].reset();
  EXPECT_THROW(channels[0]->launch({.kind = OpKind::kAllreduce, .count = 1}, in, out), Error);
  channels[0].reset();
  EXPECT_EQ(mappings(), 2);
}

}  // namespace
}  // namespace hvd::hierarchical
