#include "support/local_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <deque>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "hvd/error.h"
#include "support/fakes.h"

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}
template <class T>
std::span<std::byte> writable(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

/// World ranks 0 to 3 of one process.
class LocalBackendTest : public ::testing::Test {
 protected:
  static constexpr int kWorld = 4;

  LocalBackendTest() {
    for (int rank = 0; rank < kWorld; ++rank) {
      peers_.emplace_back(rank, kWorld);
    }
  }

  std::vector<std::unique_ptr<Channel>> open(const std::vector<int>& ranks, int process_set = 0) {
    std::vector<std::unique_ptr<Channel>> channels;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const ChannelSpec spec{
          .process_set = process_set, .ranks = ranks, .set_rank = static_cast<int>(i)};
      channels.push_back(
          LocalBackend(world_).open(spec, peers_[static_cast<std::size_t>(ranks[i])]));
    }
    return channels;
  }

  static Collective allreduce(std::int64_t count) {
    return {.dtype = DataType::kInt32, .count = count};
  }

  const std::shared_ptr<LocalWorld> world_ = std::make_shared<LocalWorld>(kWorld);
  std::deque<FakePeers> peers_;
};

template <class Expected, class Act>
std::string message_of(const Act& act) {
  try {
    act();
  } catch (const Expected& error) {
    return error.what();
  }
  ADD_FAILURE() << "did not throw";
  return {};
}

TEST_F(LocalBackendTest, DifferentParametersFailBothAndNameBoth) {
  const auto channels = open({1, 3}, 7);
  std::vector<std::int32_t> a(8);
  std::vector<std::int32_t> b(7);
  const auto first = channels[0]->launch(allreduce(8), bytes_of(a), writable(a));
  const auto second = channels[1]->launch(allreduce(7), bytes_of(b), writable(b));
  EXPECT_FALSE(first->progress());
  const auto complaint = AllOf(HasSubstr("process set 7, operation 0"),
                               HasSubstr("rank 1 allreduce sum int32, count 8"),
                               HasSubstr("rank 3 allreduce sum int32, count 7"));
  EXPECT_THAT(message_of<Error>([&] { second->progress(); }), complaint);
  EXPECT_GT(peers_[3].rung(1), 0);
  EXPECT_THAT(message_of<Error>([&] { first->progress(); }), complaint);
}

TEST_F(LocalBackendTest, SetsAreIndependentAndTheirMembersMustAgree) {
  LocalBackend backend(world_);
  const auto first = backend.open({.process_set = 1, .ranks = {0, 1}, .set_rank = 0}, peers_[0]);
  EXPECT_NO_THROW(backend.open({.process_set = 2, .ranks = {1, 2}, .set_rank = 0}, peers_[1]));
  EXPECT_THROW(backend.open({.process_set = 1, .ranks = {0, 1, 2}, .set_rank = 1}, peers_[1]),
               Error);
  std::vector<std::int32_t> memory(4);
  EXPECT_THROW(first->launch(allreduce(5), bytes_of(memory), writable(memory)), Error);
}

TEST_F(LocalBackendTest, AlltoallCountsMustPairUp) {
  const auto channels = open({0, 1});
  std::vector<std::int32_t> in(4), out(4), fewer(3);
  const std::array<std::int64_t, 2> two = {2, 2}, wrong = {1, 2};
  Collective alltoall{
      .kind = OpKind::kAlltoall, .dtype = DataType::kInt32, .counts = two, .send_counts = two};
  const auto first = channels[0]->launch(alltoall, bytes_of(in), writable(out));
  alltoall.counts = wrong;
  const auto second = channels[1]->launch(alltoall, bytes_of(in), writable(fewer));
  EXPECT_FALSE(first->progress());
  EXPECT_THAT(message_of<Error>([&] { second->progress(); }),
              HasSubstr("rank 0 sends 2 elements to rank 1, which expects 1"));
}

// The third collective uses the place of the first.
TEST_F(LocalBackendTest, AWorkKeptBeyondItsCompletionDoesNotEndALaterCollective) {
  const auto channels = open({0, 1});
  std::vector<std::int32_t> memory(1);
  std::vector<std::unique_ptr<Work>> kept;
  for (int round = 0; round < 3; ++round) {
    for (const auto& channel : channels)
      kept.push_back(channel->launch(allreduce(1), bytes_of(memory), writable(memory)));
    EXPECT_FALSE(kept[kept.size() - 2]->progress());
    if (round == 2) kept.erase(kept.begin(), kept.begin() + 4);
    EXPECT_FALSE(kept.back()->progress());
    EXPECT_TRUE(kept[kept.size() - 2]->progress());
    EXPECT_TRUE(kept.back()->progress());
  }
}

TEST_F(LocalBackendTest, ScoresCollectivesInTheHostsMemory) {
  const LocalBackend backend(world_);
  const ChannelSpec pair{.ranks = {0, 1}};
  EXPECT_EQ(backend.score({}, pair, {}), 1);
  EXPECT_EQ(backend.score({}, pair, {.kind = OpKind::kBarrier}), 0);
  EXPECT_EQ(backend.score({}, pair, {.op = ReduceOp::kAdasum}), 0);
  EXPECT_EQ(backend.score({}, {.ranks = {0, 1}, .device = {DeviceType::kCuda, 0}}, {}), 0);
}

TEST_F(LocalBackendTest, AMemberThatDiesIsNamedByTheOthers) {
  auto channels = open({1, 2, 3});
  std::vector<std::vector<std::int32_t>> memory(3, std::vector<std::int32_t>(8, 1));
  auto first = channels[0]->launch(allreduce(8), bytes_of(memory[0]), writable(memory[0]));
  auto second = channels[1]->launch(allreduce(8), bytes_of(memory[1]), writable(memory[1]));
  EXPECT_FALSE(first->progress());
  EXPECT_FALSE(second->progress());
  second.reset();
  channels[1].reset();
  EXPECT_GT(peers_[2].rung(1), 0);
  EXPECT_GT(peers_[2].rung(3), 0);
  try {
    first->progress();
    ADD_FAILURE() << "did not throw";
  } catch (const PeerLostError& error) {
    EXPECT_EQ(error.rank(), 2);
    EXPECT_THAT(error.what(), HasSubstr("rank 2 left during operation 0"));
  }
  // A later collective of another member fails at once.
  const auto third = channels[2]->launch(allreduce(8), bytes_of(memory[2]), writable(memory[2]));
  EXPECT_THROW(third->progress(), PeerLostError);
  EXPECT_EQ(memory[0], std::vector<std::int32_t>(8, 1));
}

TEST_F(LocalBackendTest, FinishedCollectivesAreCompleteThoughAMemberLeaves) {
  auto channels = open({0, 1});
  std::vector<std::int32_t> a(4, 1);
  std::vector<std::int32_t> b(4, 2);
  auto first = channels[0]->launch(allreduce(4), bytes_of(a), writable(a));
  const auto second = channels[1]->launch(allreduce(4), bytes_of(b), writable(b));
  EXPECT_FALSE(first->progress());
  EXPECT_FALSE(second->progress());
  EXPECT_TRUE(first->progress());
  first.reset();
  channels[0].reset();
  EXPECT_TRUE(second->progress());
  EXPECT_THAT(b, ElementsAre(3, 3, 3, 3));
  EXPECT_THROW(channels[1]->launch(allreduce(4), bytes_of(b), writable(b))->progress(),
               PeerLostError);
}

TEST_F(LocalBackendTest, AbortStopsTheOthersWithoutBlamingThisRank) {
  auto channels = open({0, 1});
  std::vector<std::int32_t> a(4, 1);
  std::vector<std::int32_t> b(4, 2);
  auto first = channels[0]->launch(allreduce(4), bytes_of(a), writable(a));
  auto second = channels[1]->launch(allreduce(4), bytes_of(b), writable(b));
  EXPECT_FALSE(first->progress());
  channels[0]->abort();
  EXPECT_GT(peers_[0].rung(1), 0);
  first.reset();
  channels[0].reset();
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(second->progress());
  }
  EXPECT_THAT(b, ElementsAre(2, 2, 2, 2));
  channels[1]->abort();
}

// Ranks are threads. One of them gives up at a varying moment and frees its memory. The sanitizers
// find an access to it.
TEST_F(LocalBackendTest, MemoryOfAMemberThatDiesIsNotTouchedAfterwards) {
  constexpr int kCount = 20000;
  for (int round = 0; round < 60; ++round) {
    auto channels = open({0, 1, 2}, round);
    std::vector<std::jthread> threads;
    std::atomic<int> ended{0};
    for (int rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank,
                            channel = std::move(channels[static_cast<std::size_t>(rank)])] {
        const auto memory = std::make_unique<std::vector<std::int32_t>>(kCount, rank);
        const auto work = channel->launch(allreduce(kCount), bytes_of(*memory), writable(*memory));
        int polls = rank == 1 ? round % 7 : 1 << 30;
        try {
          while (polls-- > 0 && !work->progress()) {
            std::this_thread::yield();
          }
        } catch (const PeerLostError& error) {
          EXPECT_EQ(error.rank(), 1);
        }
        ended.fetch_add(1);
      });
    }
    threads.clear();
    EXPECT_EQ(ended.load(), 3);
  }
}

}  // namespace
}  // namespace hvd::testing
