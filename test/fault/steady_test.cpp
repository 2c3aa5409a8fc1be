// The steady state of real jobs: nothing is negotiated, and whatever deviates from it comes out
// right.
#include <gtest/gtest.h>
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <hvd/memory.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "fault/mpi_call_count.h"
#include "support/seeds.h"

namespace hvd::testing {
namespace {

/// Longer than ranks wait before they ask the others to leave the replay.
constexpr std::chrono::milliseconds kLonger{1300};

/// A tensor whose values differ by rank, and the sum over all ranks; exact.
struct Tensor {
  std::string name;
  std::vector<float> memory;
  Compression compression = Compression::kNone;  // of which the values are exact, too
  Operation operation = {};

  Tensor(std::string called, std::size_t elements, Compression how = Compression::kNone)
      : name(std::move(called)), memory(elements), compression(how) {}

  void submit(int step, Progress progress = Progress::kCaller) {
    for (std::size_t i = 0; i < memory.size(); ++i)
      memory[i] = static_cast<float>((rank() + 1) * (static_cast<int>(i % 7) + step % 5));
    Submission submission;
    submission.name = name;
    submission.input = {reinterpret_cast<std::byte*>(memory.data()),
                        static_cast<std::int64_t>(memory.size()),
                        DataType::kFloat32,
                        {},
                        {static_cast<std::int64_t>(memory.size())}};
    submission.output = submission.input;
    submission.parameters = Allreduce{.compression = compression};
    operation = hvd::submit(std::move(submission), progress);
  }
  void check(int step) {
    operation.wait();
    ASSERT_TRUE(operation.status().ok()) << operation.status().message;
    const int ranks = size() * (size() + 1) / 2;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < memory.size(); ++i)
      wrong +=
          memory[i] != static_cast<float>(ranks * (static_cast<int>(i % 7) + step % 5)) ? 1 : 0;
    ASSERT_EQ(wrong, 0U) << name << " step " << step;
  }
};

class Steady : public ::testing::Test {
 protected:
  void SetUp() override {
    init();
    one_host_ = local_size() == size();
  }
  void TearDown() override { shutdown(); }

  void steps(int first, int last) {
    for (int step = first; step < last; ++step) {
      for (Tensor& tensor : tensors_) tensor.submit(step);
      for (Tensor& tensor : tensors_) tensor.check(step);
    }
  }
  /// The first and the last, of which one speaks for its host; all in a long run.
  static std::vector<int> some_ranks() {
    std::vector<int> ranks;
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == 0 || rank == size() - 1 || long_run()) ranks.push_back(rank);
    }
    return ranks;
  }
  static std::uint64_t replayed() { return metrics().locked_operations; }

  bool one_host_ = false;
  std::vector<Tensor> tensors_{{"a", 10}, {"b", 3000}, {"c", 40001}};
};

TEST_F(Steady, NothingIsNegotiated) {
  steps(0, 30);
  // What was on its way when the replay began arrives some time.
  std::this_thread::sleep_for(kLonger);
  steps(30, 130);
  const Metrics before = metrics();
  EXPECT_GT(before.locked_operations, 0U);
  const std::uint64_t called = mpi_calls();
  EXPECT_EQ(called > 0, controller() == "mpi") << "the first steps were negotiated";
  steps(130, 180);
  const Metrics after = metrics();
  const std::uint64_t calls = mpi_calls() - called;
  std::this_thread::sleep_for(
      kLonger);  // or the first to leave would be heard by one that has not looked yet
  EXPECT_EQ(after.locked_operations - before.locked_operations, 150U);
  EXPECT_EQ(after.plans_applied, before.plans_applied);
  const std::uint64_t sent = after.control_messages_sent - before.control_messages_sent;
  if (one_host_) {
    EXPECT_EQ(calls, 0U);
    EXPECT_EQ(sent, 0U);
    EXPECT_EQ(after.control_messages_received, before.control_messages_received);
  } else {
    constexpr std::uint64_t kPositions = 50 * 3, kMostRounds = 2;  // hosts: up to four
    constexpr std::uint64_t kSignsOfLife =
        20;  // that ranks of other hosts ask for when they have waited for long
    EXPECT_LE(sent, (local_rank() == 0 ? kPositions * kMostRounds : 0) + kSignsOfLife)
        << "the first rank of a host speaks for it";
  }
}

TEST_F(Steady, AnOperationInBetweenIsNegotiatedAndTheLockComesBack) {
  Tensor extra("extra", 50);
  for (int round = 0; round < 5; ++round) {
    steps(0, 12);
    extra.submit(round);
    extra.check(round);
  }
  EXPECT_GT(replayed(), 4U * 8U * 3U);
}

TEST_F(Steady, AnUnnamedOperationInEachStepIsLockedToo) {
  Tensor unnamed("", 17);
  const auto steps_with_it = [&](int count) {
    for (int step = 0; step < count; ++step) {
      steps(step, step + 1);
      unnamed.submit(step);
      unnamed.check(step);
    }
  };
  steps_with_it(30);
  std::this_thread::sleep_for(kLonger);
  const std::uint64_t before = replayed();
  steps_with_it(20);
  EXPECT_EQ(replayed() - before, 20U * 4U);
}

TEST_F(Steady, WhatIsCastOnTheWayIsLockedToo) {
  tensors_.emplace_back("half", 10, Compression::kFloat16);
  tensors_.emplace_back("brain", 40001, Compression::kBFloat16);
  steps(0, 30);
  std::this_thread::sleep_for(kLonger);
  const std::uint64_t before = replayed();
  steps(30, 50);
  EXPECT_EQ(replayed() - before, 20U * 5U);
  tensors_.back().compression = Compression::kFloat16;  // another operation of the same name
  steps(50, 90);
  EXPECT_GT(replayed() - before, 20U * 5U);
}

TEST_F(Steady, RanksMaySubmitInAnyOrder) {
  for (int step = 0; step < 30; ++step) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[(i + static_cast<std::size_t>(rank() * step)) % tensors_.size()].submit(
          step, Progress::kBackground);
    }
    for (Tensor& tensor : tensors_) tensor.check(step);
  }
  EXPECT_GT(replayed(), 50U);
}

TEST_F(Steady, AProgramThatBeginsToWaitInBetweenDoesNotHang) {
  steps(0, 10);
  for (int step = 10; step < 20; ++step) {
    for (Tensor& tensor : tensors_) {  // those that shared a batch
      tensor.submit(step);
      tensor.check(step);
    }
  }
  steps(20, 30);
}

TEST_F(Steady, ATensorThatOneRankSubmitsLateIsWaitedFor) {
  steps(0, 10);
  for (const int late : some_ranks()) {
    tensors_[0].submit(late);
    if (rank() == late) std::this_thread::sleep_for(kLonger);
    tensors_[1].submit(late);
    tensors_[2].submit(late);
    for (Tensor& tensor : tensors_) tensor.check(late);
    steps(0, 4);
  }
}

TEST_F(Steady, AStepThatEachRankLeavesOutOnceIsMadeUpForLater) {
  steps(0, 10);
  // Each rank evaluates alone for a while, in which the others are a step ahead.
  for (const int idle : some_ranks()) {
    if (rank() == idle) std::this_thread::sleep_for(kLonger);
    steps(10, 13);
  }
}

TEST_F(Steady, AChangedShapeIsNoticedByAll) {
  steps(0, 10);
  tensors_[1].memory.resize(40);
  steps(10, 20);
  tensors_[1].memory.resize(rank() == 0 ? 41 : 40);
  if (size() == 1) return;
  for (Tensor& tensor : tensors_) tensor.submit(20);
  tensors_[1].operation.wait();
  EXPECT_EQ(tensors_[1].operation.status().code, StatusCode::kMismatch);
  tensors_[0].check(20);
  tensors_[2].check(20);
  tensors_[1].memory.resize(40);
  steps(21, 25);
}

TEST_F(Steady, JoinAndBarrierComeThrough) {
  for (int epoch = 0; epoch < 3; ++epoch) {
    steps(0, 10);
    barrier();
    join();
  }
}

TEST_F(Steady, MemoryThatRanksShareIsReducedInPlace) {
  for (const std::int64_t elements : {1, 1000, 1025, 70001, 300'003}) {
    const auto memory = allocate_shared(static_cast<std::size_t>(elements) * sizeof(float));
    auto* const values = reinterpret_cast<float*>(memory.get());
    for (int step = 0; step < 6; ++step) {
      for (std::int64_t i = 0; i < elements; ++i)
        values[i] = static_cast<float>((rank() + 1) * (i % 13 + step));
      Submission submission;
      submission.name = "shared" + std::to_string(elements);
      submission.parameters = Allreduce{.op = ReduceOp::kAverage};
      submission.input = {memory.get(), elements, DataType::kFloat32, {}, {elements}};
      submission.output = submission.input;
      submission.alone = true;
      submission.keep_alive = memory;
      const Operation operation = submit(std::move(submission), Progress::kCaller);
      operation.wait();
      ASSERT_TRUE(operation.status().ok());
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < elements; ++i)
        wrong += values[i] != static_cast<float>((i % 13 + step) * (size() + 1)) / 2 ? 1 : 0;
      ASSERT_EQ(wrong, 0) << elements << " elements, step " << step;
    }
  }
}

}  // namespace
}  // namespace hvd::testing
