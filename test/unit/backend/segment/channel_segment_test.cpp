#include "backend/segment/channel_segment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace hvd::segment {
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
constexpr SlotLayout kLayout{.slot_bytes = kSlot, .results = 4};
constexpr auto kFilled = &ChannelSegment::MemberState::filled;

TEST(ChannelSegment, IsReadyOnceAllMembersAreThere) {
  RecordingPeers peers;
  const std::string name = unique_name("ready");
  ChannelSegment second({name, {4, 6}, 1}, kLayout, peers);
  EXPECT_FALSE(second.ready()) << "the first member makes it";
  ChannelSegment first({name, {4, 6}, 0}, kLayout, peers);
  EXPECT_EQ(peers.rung, (std::multiset<int>{6})) << "the second may wait for it";
  EXPECT_FALSE(first.ready());
  EXPECT_TRUE(second.ready());
  EXPECT_EQ(peers.rung, (std::multiset<int>{4, 6}));
  EXPECT_TRUE(first.ready());
  EXPECT_EQ(SharedSegment::attach(name, ChannelSegment::bytes(2, kLayout)), nullptr)
      << "the name goes with the last that has mapped it";
}

TEST(ChannelSegment, MembersSeeEachOthersProgressAndMemory) {
  RecordingPeers peers;
  const std::string name = unique_name("progress");
  ChannelSegment first({name, {0, 1}, 0}, kLayout, peers);
  ChannelSegment second({name, {0, 1}, 1}, kLayout, peers);
  ASSERT_TRUE(second.ready() && first.ready());
  EXPECT_FALSE(second.other_reached(kFilled, 1));
  first.publish(kFilled, 3);
  EXPECT_TRUE(second.other_reached(kFilled, 3));
  EXPECT_FALSE(second.other_reached(kFilled, 4));
  EXPECT_FALSE(first.other_reached(kFilled, 1)) << "one's own progress does not count";
  EXPECT_FALSE(first.all_reached(kFilled, 1)) << "here it does, and the other has none";
  second.publish(kFilled, 2);
  EXPECT_TRUE(first.all_reached(kFilled, 2));
  EXPECT_TRUE(second.all_reached(kFilled, 2));
  EXPECT_FALSE(first.all_reached(kFilled, 3)) << "the other one has not";
  EXPECT_FALSE(second.all_reached(kFilled, 3)) << "it has not itself";
  first.input(5, 0)[0] = std::byte{7};
  EXPECT_EQ(second.input(5, 0)[0], std::byte{7});
  EXPECT_EQ(second.input(5 + ChannelSegment::kInputs, 0)[0], std::byte{7})
      << "the same buffer again";
  second.result(2)[kSlot - 1] = std::byte{9};
  EXPECT_EQ(first.result(2 + kLayout.results)[kSlot - 1], std::byte{9});
}

TEST(ChannelSegment, NotesAreThereOnceAllMembersAre) {
  struct Notes {
    std::int64_t first = 0;
    std::uint32_t second = 0;
  };
  RecordingPeers peers;
  const std::string name = unique_name("notes");
  ChannelSegment first({name, {0, 1}, 0}, kLayout, peers,
                       ChannelSegment::bytes_of(Notes{.first = -5, .second = 6}));
  ChannelSegment second({name, {0, 1}, 1}, kLayout, peers,
                        ChannelSegment::bytes_of(Notes{.first = 7}));
  ASSERT_TRUE(second.ready() && first.ready());
  EXPECT_EQ(second.notes<Notes>(0).first, -5);
  EXPECT_EQ(second.notes<Notes>(0).second, 6U);
  EXPECT_EQ(first.notes<Notes>(1).first, 7);
  second.notes<Notes>(1).second = 8;
  EXPECT_EQ(first.notes<Notes>(1).second, 8U);
}

// A member that finds all others there reads their notes at once.
TEST(ChannelSegment, AMembersNotesAreWrittenBeforeItCountsAsThere) {
  using Notes = std::array<std::uint64_t, 12>;
  for (int repeat = 0; repeat < 200; ++repeat) {
    RecordingPeers peers, others_peers;
    const std::string name = unique_name(("order-" + std::to_string(repeat)).c_str());
    Notes notes;
    notes.fill(static_cast<std::uint64_t>(repeat) + 1);
    ChannelSegment first({name, {0, 1}, 0}, kLayout, peers);
    std::thread other([&] {
      ChannelSegment second({name, {0, 1}, 1}, kLayout, others_peers,
                            ChannelSegment::bytes_of(notes));
      while (!second.ready()) std::this_thread::yield();
    });
    while (!first.ready()) {
    }
    const Notes read = first.notes<Notes>(1);
    other.join();
    ASSERT_EQ(read, notes);
  }
}

// What a job asks for of /dev/shm, and what its channels take of it.
TEST(ChannelSegment, IsAsLargeAsItsSlotsAndAPairOfLinesForEachMember) {
  EXPECT_EQ(ChannelSegment::bytes(3, {.slot_bytes = 4096, .results = 2}),
            128U + 3 * 128U + (2 * 3 + 2) * 4096U);
}

TEST(ChannelSegment, TheChannelForSmallOperationsHasSmallSlots) {
  constexpr std::size_t kKiB = 1024;
  EXPECT_EQ(slot_bytes_for(0, 128 * kKiB, 4 * kKiB), 128 * kKiB);
  EXPECT_EQ(slot_bytes_for(kUrgentInstance, 128 * kKiB, 4 * kKiB), 32 * kKiB);
  EXPECT_EQ(slot_bytes_for(kUrgentInstance, 128 * kKiB, 64 * kKiB), 64 * kKiB);
  EXPECT_EQ(slot_bytes_for(kUrgentInstance, kKiB, 512), kKiB);
}

TEST(ChannelSegment, TheNamesOfAJobsChannelsDiffer) {
  EXPECT_EQ(ChannelSegment::suffix({.process_set = 3}), "-3");
  EXPECT_EQ(ChannelSegment::suffix({.process_set = 3, .instance = 2}), "-3.2");
}

TEST(ChannelSegment, NoTwoBuffersOverlap) {
  RecordingPeers peers;
  const std::string name = unique_name("overlap");
  ChannelSegment segment({name, {0, 1, 2}, 0}, kLayout, peers);
  ChannelSegment second({name, {0, 1, 2}, 1}, kLayout, peers);
  ChannelSegment third({name, {0, 1, 2}, 2}, kLayout, peers);
  EXPECT_FALSE(second.ready()) << "the third is not here yet";
  ASSERT_TRUE(third.ready() && second.ready() && segment.ready());
  std::set<std::byte*> places;
  for (std::uint64_t round = 0; round < ChannelSegment::kInputs; ++round) {
    for (std::size_t member = 0; member < 3; ++member) places.insert(segment.input(round, member));
  }
  for (std::uint64_t round = 0; round < kLayout.results; ++round)
    places.insert(segment.result(round));
  EXPECT_EQ(places.size(), 3 * ChannelSegment::kInputs + kLayout.results);
  for (auto place = places.begin(); std::next(place) != places.end(); ++place) {
    EXPECT_GE(static_cast<std::size_t>(*std::next(place) - *place), kSlot);
  }
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(*places.begin()) % 64, 0U);
}

TEST(ChannelSegment, AMemberThatIsAloneSharesNothing) {
  RecordingPeers peers;
  const std::string name = unique_name("alone");
  ChannelSegment segment({name, {5}, 0}, kLayout, peers);
  EXPECT_TRUE(segment.ready());
  EXPECT_TRUE(segment.all_reached(kFilled, 0));
  EXPECT_TRUE(peers.rung.empty());
  EXPECT_EQ(SharedSegment::attach(name, ChannelSegment::bytes(1, kLayout)), nullptr);
}

}  // namespace
}  // namespace hvd::segment
