#include "backend/local/local_backend.h"

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

namespace hvd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class CountingPeers final : public Peers {
 public:
  CountingPeers(int rank, int size) : rank_(rank), rings(static_cast<std::size_t>(size)) {}
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(rings.size()); }
  void ring(int world_rank) noexcept override {
    rings[static_cast<std::size_t>(world_rank)].fetch_add(1);
  }
  int rung(int world_rank) const { return rings[static_cast<std::size_t>(world_rank)].load(); }

 private:
  const int rank_;
  std::deque<std::atomic<int>> rings;
};

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}
template <class T>
std::span<std::byte> writable(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

/// World ranks 0 .. size-1 of one process; `set` is a process set over some of them.
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
  std::deque<CountingPeers> peers_;
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

TEST_F(LocalBackendTest, WaitsUntilAllHavePostedAndFinishesWhenAllSharesAreDone) {
  const auto channels = open({1, 3});
  std::vector<std::int32_t> a(200, 1);
  std::vector<std::int32_t> b(200, 2);
  const auto first = channels[0]->launch(allreduce(200), bytes_of(a), writable(a));
  const auto second = channels[1]->launch(allreduce(200), bytes_of(b), writable(b));
  EXPECT_FALSE(first->progress());
  EXPECT_FALSE(first->progress());
  EXPECT_EQ(peers_[1].rung(3), 0);
  EXPECT_FALSE(second->progress());  // posts and does its share
  EXPECT_EQ(peers_[3].rung(1), 1);   // the other may sleep and has work now
  EXPECT_FALSE(second->progress());
  EXPECT_TRUE(first->progress());
  EXPECT_EQ(peers_[1].rung(3), 1);  // the other may sleep and is done now
  EXPECT_TRUE(second->progress());
  EXPECT_EQ(a, std::vector<std::int32_t>(200, 3));
  EXPECT_EQ(b, a);
}

TEST_F(LocalBackendTest, AWorkKeptBeyondItsCompletionHarmsNothing) {
  const auto channels = open({0, 1});
  std::vector<std::unique_ptr<Work>> kept;
  for (int round = 0; round < 5; ++round) {
    std::vector<std::int32_t> a(1, round);
    std::vector<std::int32_t> b(1, 10);
    kept.push_back(channels[0]->launch(allreduce(1), bytes_of(a), writable(a)));
    kept.push_back(channels[1]->launch(allreduce(1), bytes_of(b), writable(b)));
    const std::span<std::unique_ptr<Work>> now(kept.end() - 2, kept.end());
    EXPECT_FALSE(now[0]->progress());
    EXPECT_FALSE(now[1]->progress());
    EXPECT_TRUE(now[0]->progress());
    EXPECT_TRUE(now[1]->progress());
    EXPECT_EQ(a[0], round + 10);
    if (round == 3) {
      kept.resize(4);  // destroys older works in the middle of later ones
    }
  }
}

TEST_F(LocalBackendTest, ProcessSetsDoNotMeetEachOther) {
  const auto left = open({0, 1}, 1);
  const auto right = open({1, 2}, 2);
  std::vector<std::int32_t> data(4, 1);
  std::vector<std::vector<std::int32_t>> memory(4, data);
  const auto a = left[0]->launch(allreduce(4), bytes_of(memory[0]), writable(memory[0]));
  const auto b = right[0]->launch(allreduce(4), bytes_of(memory[1]), writable(memory[1]));
  EXPECT_FALSE(a->progress());
  EXPECT_FALSE(b->progress());
  EXPECT_FALSE(a->progress());
  const auto c = left[1]->launch(allreduce(4), bytes_of(memory[2]), writable(memory[2]));
  EXPECT_FALSE(c->progress());
  EXPECT_TRUE(a->progress());
  EXPECT_FALSE(b->progress());
  EXPECT_EQ(memory[0][0], 2);
  EXPECT_EQ(memory[1][0], 1);
}

TEST_F(LocalBackendTest, ASetMayBeOpenedAgain) {
  for (int opening = 0; opening < 3; ++opening) {
    const auto channels = open({0, 1}, 5);
    std::vector<std::int32_t> a(1, opening);
    std::vector<std::int32_t> b(1, 1);
    const auto first = channels[0]->launch(allreduce(1), bytes_of(a), writable(a));
    const auto second = channels[1]->launch(allreduce(1), bytes_of(b), writable(b));
    EXPECT_FALSE(first->progress());
    EXPECT_FALSE(second->progress());
    EXPECT_TRUE(first->progress());
    EXPECT_TRUE(second->progress());
    EXPECT_EQ(b[0], opening + 1);
  }
}

TEST_F(LocalBackendTest, MembersMustAgreeWhoIsInTheSet) {
  LocalBackend backend(world_);
  const auto channel = backend.open({.process_set = 1, .ranks = {0, 1}, .set_rank = 0}, peers_[0]);
  EXPECT_THROW(backend.open({.process_set = 1, .ranks = {0, 1, 2}, .set_rank = 1}, peers_[1]),
               Error);
}

TEST_F(LocalBackendTest, DifferentParametersFailBothAndNameBoth) {
  const auto channels = open({1, 3}, 7);
  std::vector<std::int32_t> a(8);
  std::vector<std::int32_t> b(8);
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

TEST_F(LocalBackendTest, AlltoallCountsMustPairUp) {
  const auto channels = open({0, 1});
  std::vector<std::int32_t> in(4);
  std::vector<std::int32_t> out(4);
  std::vector<std::int32_t> out_of_other(4);
  const std::array<std::int64_t, 2> two = {2, 2};
  const std::array<std::int64_t, 2> wrong = {1, 2};
  const Collective right{
      .kind = OpKind::kAlltoall, .dtype = DataType::kInt32, .counts = two, .send_counts = two};
  const Collective left{
      .kind = OpKind::kAlltoall, .dtype = DataType::kInt32, .counts = wrong, .send_counts = two};
  const auto first = channels[0]->launch(right, bytes_of(in), writable(out));
  const auto second = channels[1]->launch(left, bytes_of(in), writable(out_of_other));
  EXPECT_FALSE(first->progress());
  EXPECT_THAT(message_of<Error>([&] { second->progress(); }),
              HasSubstr("rank 0 sends 2 elements to rank 1, which expects 1"));
  EXPECT_THROW(first->progress(), Error);
}

TEST_F(LocalBackendTest, RefusesArgumentsThatDoNotFit) {
  const auto channels = open({0, 1});
  std::vector<std::int32_t> memory(4);
  const std::array<std::int64_t, 1> one_count = {4};
  const auto launch = [&](const Collective& c) {
    channels[0]->launch(c, bytes_of(memory), writable(memory));
  };
  EXPECT_THAT(message_of<Error>([&] { launch(allreduce(5)); }),
              HasSubstr("expected 5 elements in and 5 out, got 16 and 16 bytes"));
  EXPECT_THROW(launch({.kind = OpKind::kAllgather, .dtype = DataType::kInt32, .counts = one_count}),
               Error);
  EXPECT_THROW(
      launch({.kind = OpKind::kBroadcast, .dtype = DataType::kInt32, .count = 4, .root = 2}),
      Error);
  EXPECT_THROW(launch({.kind = OpKind::kBarrier}), Error);
  EXPECT_THROW(launch({.op = ReduceOp::kAverage, .dtype = DataType::kInt32, .count = 4}), Error);
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
  // One that comes later learns it at once.
  const auto third = channels[2]->launch(allreduce(8), bytes_of(memory[2]), writable(memory[2]));
  EXPECT_THROW(third->progress(), PeerLostError);
  EXPECT_EQ(memory[0], std::vector<std::int32_t>(8, 1));
}

TEST_F(LocalBackendTest, WhatAllHaveDoneIsCompleteThoughAMemberLeaves) {
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

// Ranks as threads; one gives up at a random moment and frees its memory. The sanitizers watch for
// a touch of it.
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
        int patience = rank == 1 ? round % 7 : 1 << 30;
        try {
          while (patience-- > 0 && !work->progress()) {
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

TEST_F(LocalBackendTest, ScoresWhatItCanDo) {
  const LocalBackend shared(world_);
  const LocalBackend solo;
  const ChannelSpec pair{.ranks = {0, 1}};
  const ChannelSpec single{.ranks = {2}};
  const ChannelSpec on_gpu{.ranks = {0, 1}, .device = {.type = DeviceType::kCuda}};
  const auto score = [](const Backend& backend, const ChannelSpec& spec, const Collective& c) {
    return backend.score({}, spec, c);
  };
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kBroadcast,
                            OpKind::kReducescatter, OpKind::kAlltoall}) {
    EXPECT_EQ(score(shared, pair, {.kind = kind}), 1);
    EXPECT_EQ(score(shared, on_gpu, {.kind = kind}), 0);
    EXPECT_EQ(score(solo, single, {.kind = kind}), 1);
    EXPECT_EQ(score(solo, pair, {.kind = kind}), 0);
  }
  EXPECT_EQ(score(shared, pair, {.op = ReduceOp::kAdasum}), 0);
  EXPECT_EQ(score(shared, pair, {.kind = OpKind::kBarrier}), 0);
  EXPECT_EQ(score(shared, pair, {.kind = OpKind::kJoin}), 0);
  EXPECT_EQ(shared.name(), "local");
}

TEST_F(LocalBackendTest, ARankAloneCopiesAndScalesAtOnce) {
  LocalBackend solo;
  CountingPeers nobody(0, 1);
  const auto channel = solo.open({.ranks = {0}}, nobody);
  const std::vector<float> in = {1, 2, 3};
  std::vector<float> out(3);
  const Collective collective{.count = 3, .scale = {0.5, 3.0, 1}};
  EXPECT_TRUE(channel->launch(collective, bytes_of(in), writable(out))->progress());
  EXPECT_THAT(out, ElementsAre(1.5f, 3.0f, 4.5f));
  EXPECT_EQ(nobody.rung(0), 0);
}

}  // namespace
}  // namespace hvd
