#include "backend/composite/composite_work.h"

#include <gtest/gtest.h>

#include <array>
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

}  // namespace
}  // namespace hvd::testing
