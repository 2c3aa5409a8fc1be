#include "bench/exercise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace hvd::bench {
namespace {

constexpr OpKind kKinds[] = {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kBroadcast,
                             OpKind::kReducescatter, OpKind::kAlltoall};

/// Holds all ranks of an exercise in one process, and computes the results serially.
class Job {
 public:
  Job(OpKind kind, std::size_t bytes, int ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      arenas_.push_back(std::make_unique<Arena>(Exercise::floats_needed(bytes, ranks)));
      exercises_.emplace_back(kind, bytes, rank, ranks, *arenas_.back());
      exercises_.back().fill();
      exercises_.back().spoil();
    }
  }

  void solve() {
    std::vector<std::vector<float>> inputs;
    for (const Exercise& one : exercises_)
      inputs.emplace_back(one.input().begin(), one.input().end());
    for (std::size_t rank = 0; rank < exercises_.size(); ++rank) {
      const auto output = exercises_[rank].output();
      for (std::size_t i = 0; i < output.size(); ++i) output[i] = result(inputs, rank, i);
    }
  }

  std::vector<Exercise>& ranks() { return exercises_; }

 private:
  float result(const std::vector<std::vector<float>>& inputs, std::size_t rank,
               std::size_t i) const {
    const std::size_t block = exercises_[rank].block();
    const auto sum = [&](std::size_t index) {
      float total = 0;
      for (const auto& input : inputs) total += input[index];
      return total;
    };
    switch (exercises_[rank].kind()) {
      case OpKind::kAllreduce:
        return sum(i);
      case OpKind::kReducescatter:
        return sum(rank * block + i);
      case OpKind::kBroadcast:
        return inputs[0][i];
      case OpKind::kAllgather:
        return inputs[i / block][i % block];
      default:
        return inputs[i / block][rank * block + i % block];
    }
  }

  std::vector<std::unique_ptr<Arena>> arenas_;
  std::vector<Exercise> exercises_;
};

TEST(Exercise, TheRightResultIsAccepted) {
  for (const OpKind kind : kKinds) {
    for (const int ranks : {1, 2, 3}) {
      for (const std::size_t bytes : {4, 1000, 200'000}) {
        Job job(kind, bytes, ranks);
        job.solve();
        for (const Exercise& one : job.ranks()) EXPECT_EQ(one.fault(), std::nullopt);
      }
    }
  }
}

TEST(Exercise, AMissingResultIsAFault) {
  for (const OpKind kind : kKinds) {
    Job job(kind, 4096, 2);
    EXPECT_NE(job.ranks()[1].fault(), std::nullopt) << to_string(kind);
  }
}

TEST(Exercise, OneWrongElementIsAFault) {
  for (const OpKind kind : kKinds) {
    Job job(kind, 100'000, 2);
    job.solve();
    job.ranks()[0].output().back() += 1;
    EXPECT_NE(job.ranks()[0].fault(), std::nullopt) << to_string(kind);
  }
}

TEST(Exercise, AChunkInThePlaceOfTheNextIsAFault) {
  constexpr std::size_t kChunk = 65536;
  for (const OpKind kind : kKinds) {
    Job job(kind, 4 * 4 * kChunk, 2);
    job.solve();
    const auto output = job.ranks()[0].output();
    std::copy_n(output.begin(), kChunk, output.begin() + kChunk);
    EXPECT_NE(job.ranks()[0].fault(), std::nullopt) << to_string(kind);
  }
}

TEST(Exercise, SizesAreThoseOfNcclTests) {
  const Arena arena(1024);
  const Exercise gather(OpKind::kAllgather, 400, 0, 4, arena);
  EXPECT_EQ(gather.bytes(), 400u);
  EXPECT_EQ(gather.input().size(), 25u);
  EXPECT_EQ(gather.output().size(), 100u);
  const Exercise scatter(OpKind::kReducescatter, 400, 0, 4, arena);
  EXPECT_EQ(scatter.input().size(), 100u);
  EXPECT_EQ(scatter.output().size(), 25u);
  EXPECT_EQ(scatter.larger().size(), 100u);
  EXPECT_EQ(Exercise(OpKind::kAlltoall, 4, 0, 4, arena).bytes(), 16u)
      << "one element for every rank at least";
  EXPECT_EQ(Exercise(OpKind::kAllreduce, 4, 0, 4, arena).bytes(), 4u);
}

}  // namespace
}  // namespace hvd::bench
