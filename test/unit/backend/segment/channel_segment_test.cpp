#include "backend/segment/channel_segment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/fakes.h"

namespace hvd::segment {
namespace {

using testing::FakePeers;

std::string unique_name(const char* test) {
  return "/hvd-test-" + std::to_string(::getpid()) + "-" + test;
}

constexpr std::size_t kBufferBytes = 128;
constexpr BufferLayout kLayout{.buffer_bytes = kBufferBytes, .results = 4};
constexpr auto kFilled = &ChannelSegment::MemberState::filled;

TEST(ChannelSegment, IsReadyOnceAllMembersHaveMappedIt) {
  FakePeers peers;
  const std::string name = unique_name("ready");
  ChannelSegment second({name, {4, 6}, 1}, kLayout, peers);
  EXPECT_FALSE(second.ready()) << "the first member creates it";
  ChannelSegment first({name, {4, 6}, 0}, kLayout, peers);
  EXPECT_EQ(peers.rung(6), 1) << "the second may wait for it";
  EXPECT_FALSE(first.ready());
  EXPECT_TRUE(second.ready());
  EXPECT_EQ(peers.rung(4), 1);
  EXPECT_EQ(peers.rung(6), 1);
  EXPECT_TRUE(first.ready());
  EXPECT_EQ(SharedSegment::attach(name, ChannelSegment::bytes(2, kLayout)), nullptr)
      << "the last member to map it removes the name";
}

TEST(ChannelSegment, MembersSeeEachOthersProgressAndMemory) {
  FakePeers peers;
  const std::string name = unique_name("progress");
  ChannelSegment first({name, {0, 1}, 0}, kLayout, peers);
  ChannelSegment second({name, {0, 1}, 1}, kLayout, peers);
  ASSERT_TRUE(second.ready() && first.ready());
  EXPECT_FALSE(second.other_reached(kFilled, 1));
  first.publish(kFilled, 3);
  EXPECT_TRUE(second.other_reached(kFilled, 3));
  EXPECT_FALSE(second.other_reached(kFilled, 4));
  EXPECT_FALSE(first.other_reached(kFilled, 1)) << "the own counter does not count";
  EXPECT_FALSE(first.all_reached(kFilled, 1)) << "the other member's counter is 0";
  second.publish(kFilled, 2);
  EXPECT_TRUE(first.all_reached(kFilled, 2));
  EXPECT_TRUE(second.all_reached(kFilled, 2));
  EXPECT_FALSE(first.all_reached(kFilled, 3)) << "the other member has reached 2";
  EXPECT_FALSE(second.all_reached(kFilled, 3)) << "this member has reached 2";
  first.input(5, 0)[0] = std::byte{7};
  EXPECT_EQ(second.input(5, 0)[0], std::byte{7});
  EXPECT_EQ(second.input(5 + ChannelSegment::kInputs, 0)[0], std::byte{7})
      << "the same buffer again";
  second.result(2)[kBufferBytes - 1] = std::byte{9};
  EXPECT_EQ(first.result(2 + kLayout.results)[kBufferBytes - 1], std::byte{9});
}

TEST(ChannelSegment, InfoIsValidOnceAllMembersHaveMappedIt) {
  struct Info {
    std::int64_t first = 0;
    std::uint32_t second = 0;
  };
  FakePeers peers;
  const std::string name = unique_name("info");
  ChannelSegment first({name, {0, 1}, 0}, kLayout, peers,
                       ChannelSegment::bytes_of(Info{.first = -5, .second = 6}));
  ChannelSegment second({name, {0, 1}, 1}, kLayout, peers,
                        ChannelSegment::bytes_of(Info{.first = 7}));
  ASSERT_TRUE(second.ready() && first.ready());
  EXPECT_EQ(second.info<Info>(0).first, -5);
  EXPECT_EQ(second.info<Info>(0).second, 6U);
  EXPECT_EQ(first.info<Info>(1).first, 7);
  second.info<Info>(1).second = 8;
  EXPECT_EQ(first.info<Info>(1).second, 8U);
}

// A member reads the info of the others as soon as ready() is true.
TEST(ChannelSegment, AMembersInfoIsWrittenBeforeItCountsAsAttached) {
  using Info = std::array<std::uint64_t, 12>;
  for (int repeat = 0; repeat < 200; ++repeat) {
    FakePeers peers, others_peers;
    const std::string name = unique_name(("order-" + std::to_string(repeat)).c_str());
    Info info;
    info.fill(static_cast<std::uint64_t>(repeat) + 1);
    ChannelSegment first({name, {0, 1}, 0}, kLayout, peers);
    std::thread other([&] {
      ChannelSegment second({name, {0, 1}, 1}, kLayout, others_peers,
                            ChannelSegment::bytes_of(info));
      while (!second.ready()) std::this_thread::yield();
    });
    while (!first.ready()) {
    }
    const Info read = first.info<Info>(1);
    other.join();
    ASSERT_EQ(read, info);
  }
}

TEST(ChannelSegment, HasBuffersAndTwoCacheLinesForEachMember) {
  EXPECT_EQ(ChannelSegment::bytes(3, {.buffer_bytes = 4096, .results = 2}),
            128U + 3 * 128U + (2 * 3 + 2) * 4096U);
}

TEST(ChannelSegment, TheChannelForSmallOperationsHasSmallBuffers) {
  constexpr std::size_t kKiB = 1024;
  EXPECT_EQ(buffer_bytes_for(0, 128 * kKiB, 4 * kKiB), 128 * kKiB);
  EXPECT_EQ(buffer_bytes_for(kUrgentInstance, 128 * kKiB, 4 * kKiB), 32 * kKiB);
  EXPECT_EQ(buffer_bytes_for(kUrgentInstance, 128 * kKiB, 64 * kKiB), 64 * kKiB);
  EXPECT_EQ(buffer_bytes_for(kUrgentInstance, kKiB, 512), kKiB);
}

TEST(ChannelSegment, TheNamesOfAJobsChannelsDiffer) {
  EXPECT_EQ(ChannelSegment::suffix({.process_set = 3}), "-3");
  EXPECT_EQ(ChannelSegment::suffix({.process_set = 3, .instance = 2}), "-3.2");
}

TEST(ChannelSegment, NoTwoBuffersOverlap) {
  FakePeers peers;
  const std::string name = unique_name("overlap");
  ChannelSegment segment({name, {0, 1, 2}, 0}, kLayout, peers);
  ChannelSegment second({name, {0, 1, 2}, 1}, kLayout, peers);
  ChannelSegment third({name, {0, 1, 2}, 2}, kLayout, peers);
  EXPECT_FALSE(second.ready()) << "the third member has not mapped it yet";
  ASSERT_TRUE(third.ready() && second.ready() && segment.ready());
  std::set<std::byte*> places;
  for (std::uint64_t round = 0; round < ChannelSegment::kInputs; ++round) {
    for (std::size_t member = 0; member < 3; ++member) places.insert(segment.input(round, member));
  }
  for (std::uint64_t round = 0; round < kLayout.results; ++round)
    places.insert(segment.result(round));
  EXPECT_EQ(places.size(), 3 * ChannelSegment::kInputs + kLayout.results);
  for (auto place = places.begin(); std::next(place) != places.end(); ++place) {
    EXPECT_GE(static_cast<std::size_t>(*std::next(place) - *place), kBufferBytes);
  }
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(*places.begin()) % 64, 0U);
}

TEST(ChannelSegment, ASingleMemberCreatesNoFile) {
  FakePeers peers;
  const std::string name = unique_name("alone");
  ChannelSegment segment({name, {5}, 0}, kLayout, peers);
  EXPECT_TRUE(segment.ready());
  EXPECT_TRUE(segment.all_reached(kFilled, 0));
  EXPECT_EQ(peers.rung(5), 0);
  EXPECT_EQ(SharedSegment::attach(name, ChannelSegment::bytes(1, kLayout)), nullptr);
}

}  // namespace
}  // namespace hvd::segment
