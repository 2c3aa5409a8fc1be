#include "backend/composite/composite_work.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

namespace hvd::testing {
namespace {

/// A collective that makes progress but does not complete.
class MovingWork final : public Work {
 public:
  explicit MovingWork(const bool& moved) : moved_(moved) {}
  bool progress() override { return false; }
  bool moved() const noexcept override { return moved_; }

 private:
  const bool& moved_;
};

class CompositeWorkTest : public ::testing::Test {
 protected:
  // The engine sleeps when no Work moves. A composite that did not forward moved() would sleep
  // between the rounds of its parts.
  void expect_passes_on_what_moves(Work& work) {
    for (const bool moves : {false, true, false}) {
      moved_ = moves;
      EXPECT_FALSE(work.progress());
      EXPECT_EQ(work.moved(), moves);
    }
  }

  bool moved_ = false;
  const composite::Launch launch_ = [this](const Collective&, std::span<const std::byte>,
                                           std::span<std::byte>) {
    return std::make_unique<MovingWork>(moved_);
  };
};

TEST_F(CompositeWorkTest, AnAlltoallMovesWhenItsPartDoes) {
  std::array<float, 2> input{};
  Submission submission;
  submission.parameters = Alltoall{.splits = {1, 1}};
  submission.input = {reinterpret_cast<std::byte*>(input.data()), 2, DataType::kFloat32, {}, {2}};
  expect_passes_on_what_moves(*composite::make_alltoall(launch_, launch_, submission));
}

TEST_F(CompositeWorkTest, AnAdasumMovesWhenItsPartDoes) {
  std::array<float, 2> vector{};
  Collective collective;
  collective.op = ReduceOp::kAdasum;
  collective.count = 2;
  ChannelSpec spec;
  spec.ranks = {0, 1};
  const auto memory = std::as_writable_bytes(std::span(vector));
  expect_passes_on_what_moves(*composite::make_adasum(launch_, collective, spec, memory, memory));
}

/// A collective that has completed.
class CompleteWork final : public Work {
 public:
  bool progress() override { return true; }
};

TEST(BoundedAdasum, OneCallComputesAboutOneMebibyte) {
  constexpr std::size_t kCount = std::size_t{1} << 20;
  std::vector<float> vector(kCount, 1.0F);
  const composite::Launch launch = [](const Collective& collective, std::span<const std::byte> in,
                                      std::span<std::byte> out) {
    if (collective.kind == OpKind::kAlltoall) {
      std::memcpy(out.data(), in.data(), out.size() / 2);
      std::memcpy(out.data() + out.size() / 2, in.data(), out.size() / 2);
    } else if (collective.kind == OpKind::kAllgather) {
      std::memcpy(out.data(), in.data(), in.size());
    }
    return std::make_unique<CompleteWork>();
  };
  Collective collective;
  collective.op = ReduceOp::kAdasum;
  collective.count = kCount;
  ChannelSpec spec;
  spec.ranks = {0, 1};
  const auto memory = std::as_writable_bytes(std::span(vector));
  const auto work = composite::make_adasum(launch, collective, spec, memory, memory);
  int calls = 1;
  while (!work->progress()) {
    EXPECT_TRUE(work->moved());
    ++calls;
  }
  // Half of the vector is this rank's: 2 slices are read, a pair is multiplied and combined, and
  // one slice is written, 2^17 elements per call.
  EXPECT_GE(calls, 5 * static_cast<int>(kCount / 2 >> 17));
  // The sum of equal vectors is their average.
  for (std::size_t k = 0; k < kCount / 2; ++k) ASSERT_FLOAT_EQ(vector[k], 1.0F) << k;
}

}  // namespace
}  // namespace hvd::testing
