#include "backend/hierarchical/host_segment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <set>
#include <string>
#include <vector>

namespace hvd::hierarchical {
namespace {

class RecordingPeers final : public Peers {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 8; }
  void ring(int world_rank) noexcept override { rung.insert(world_rank); }
  std::multiset<int> rung = {};
};

std::string unique_name(const char* test) {
  return "/hvd-test-" + std::to_string(::getpid()) + "-" + test;
}

constexpr std::size_t kSlot = 128;
constexpr auto kFilled = &HostSegment::MemberState::filled;

TEST(HostSegment, IsReadyOnceAllMembersAreThere) {
  RecordingPeers peers;
  const std::string name = unique_name("ready");
  HostSegment second(name, {4, 6}, 1, kSlot, peers);
  EXPECT_FALSE(second.ready()) << "the first member makes it";
  HostSegment first(name, {4, 6}, 0, kSlot, peers);
  EXPECT_EQ(peers.rung, (std::multiset<int>{6})) << "the second may wait for it";
  EXPECT_FALSE(first.ready());
  EXPECT_TRUE(second.ready());
  EXPECT_EQ(peers.rung, (std::multiset<int>{4, 6}));
  EXPECT_TRUE(first.ready());
  EXPECT_EQ(SharedSegment::attach(name, HostSegment::bytes(2, kSlot)), nullptr)
      << "the name goes with the last that has mapped it";
}

TEST(HostSegment, MembersSeeEachOthersProgressAndMemory) {
  RecordingPeers peers;
  const std::string name = unique_name("progress");
  HostSegment first(name, {0, 1}, 0, kSlot, peers);
  HostSegment second(name, {0, 1}, 1, kSlot, peers);
  ASSERT_TRUE(second.ready() && first.ready());
  EXPECT_FALSE(second.others_reached(kFilled, 1));
  first.reach(kFilled, 3);
  EXPECT_TRUE(second.others_reached(kFilled, 3));
  EXPECT_FALSE(second.others_reached(kFilled, 4));
  EXPECT_FALSE(first.others_reached(kFilled, 1)) << "one's own progress does not count";
  first.input(5, 0)[0] = std::byte{7};
  EXPECT_EQ(second.input(5, 0)[0], std::byte{7});
  EXPECT_EQ(second.input(5 + HostSegment::kInputs, 0)[0], std::byte{7}) << "the same buffer again";
  second.result(2)[kSlot - 1] = std::byte{9};
  EXPECT_EQ(first.result(2 + HostSegment::kResults)[kSlot - 1], std::byte{9});
}

TEST(HostSegment, NoTwoBuffersOverlap) {
  RecordingPeers peers;
  HostSegment segment(unique_name("overlap"), {0, 1, 2}, 0, kSlot, peers);
  std::set<std::byte*> places;
  for (std::uint64_t round = 0; round < HostSegment::kInputs; ++round) {
    for (int member = 0; member < 3; ++member) places.insert(segment.input(round, member));
  }
  for (std::uint64_t round = 0; round < HostSegment::kResults; ++round)
    places.insert(segment.result(round));
  EXPECT_EQ(places.size(), 3 * HostSegment::kInputs + HostSegment::kResults);
  for (auto place = places.begin(); std::next(place) != places.end(); ++place) {
    EXPECT_GE(static_cast<std::size_t>(*std::next(place) - *place), kSlot);
  }
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(*places.begin()) % 64, 0U);
}

TEST(HostSegment, AMemberThatIsAloneSharesNothing) {
  RecordingPeers peers;
  const std::string name = unique_name("alone");
  HostSegment segment(name, {5}, 0, kSlot, peers);
  EXPECT_TRUE(segment.ready());
  EXPECT_TRUE(segment.others_reached(kFilled, 100));
  EXPECT_TRUE(peers.rung.empty());
  EXPECT_EQ(SharedSegment::attach(name, HostSegment::bytes(1, kSlot)), nullptr);
}

}  // namespace
}  // namespace hvd::hierarchical
