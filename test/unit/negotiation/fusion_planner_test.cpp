#include "negotiation/fusion_planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using Batches = std::vector<std::vector<std::size_t>>;

class Tensors {
 public:
  Tensors& add(wire::Request request, std::int64_t bytes) {
    requests_.push_back(std::move(request));
    bytes_.push_back(bytes);
    return *this;
  }
  Batches plan(std::int64_t threshold) const {
    std::vector<ReadyTensor> ready;
    for (std::size_t i = 0; i < requests_.size(); ++i) ready.push_back({&requests_[i], bytes_[i]});
    return plan_fusion(ready, threshold);
  }
  const std::vector<wire::Request>& requests() const { return requests_; }
  std::int64_t bytes(std::size_t i) const { return bytes_[i]; }

 private:
  std::vector<wire::Request> requests_;
  std::vector<std::int64_t> bytes_;
};

TEST(FusionPlanner, BatchesGrowToTheThresholdAndNotBeyond) {
  const Tensors tensors = Tensors()
                              .add(allreduce("a"), 40)
                              .add(allreduce("b"), 60)
                              .add(allreduce("c"), 1)
                              .add(allreduce("d"), 99);
  EXPECT_EQ(tensors.plan(100), (Batches{{0, 1}, {2, 3}}));
  EXPECT_EQ(tensors.plan(200), (Batches{{0, 1, 2, 3}}));
  EXPECT_EQ(tensors.plan(99), (Batches{{0}, {1, 2}, {3}}));
}

TEST(FusionPlanner, ATensorAboveTheThresholdGoesAlone) {
  EXPECT_EQ(
      Tensors().add(allreduce("a"), 10).add(allreduce("b"), 500).add(allreduce("c"), 10).plan(100),
      (Batches{{0}, {1}, {2}}));
}

TEST(FusionPlanner, OperationsThatRunAloneAreNotFused) {
  wire::Request bucket = allreduce("bucket");
  bucket.alone = true;
  EXPECT_EQ(Tensors().add(allreduce("a"), 10).add(bucket, 10).add(allreduce("b"), 10).plan(100),
            (Batches{{0, 2}, {1}}));
}

TEST(FusionPlanner, AThresholdOfZeroFusesNothingNotEvenNothing) {
  EXPECT_EQ(Tensors().add(allreduce("a"), 0).add(allreduce("b"), 0).plan(0), (Batches{{0}, {1}}));
  EXPECT_EQ(Tensors().add(allreduce("a"), 0).add(allreduce("b"), 0).plan(1), (Batches{{0, 1}}));
}

TEST(FusionPlanner, OnlySimilarOperationsShareABatch) {
  const std::vector<std::function<void(wire::Request&)>> changes = {
      [](auto& r) { r.process_set = 1; },
      [](auto& r) { r.kind = OpKind::kAllgather; },
      [](auto& r) { r.op = ReduceOp::kMax; },
      [](auto& r) { r.dtype = DataType::kFloat16; },
      [](auto& r) { r.compression = Compression::kFloat16; },
      [](auto& r) { r.compression = Compression::kBFloat16; },
      [](auto& r) { r.device = DeviceType::kCuda; },
      [](auto& r) { r.root = 1; },
      [](auto& r) { r.prescale = 2; },
      [](auto& r) { r.postscale = 2; },
      [](auto& r) { r.prescale = std::nan(""); }};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    wire::Request other = allreduce("b");
    changes[i](other);
    EXPECT_FALSE(may_share_batch(allreduce("a"), other)) << i;
    // The first kind's batch stays open meanwhile.
    EXPECT_EQ(Tensors()
                  .add(allreduce("a"), 8)
                  .add(other, 8)
                  .add(allreduce("c"), 8)
                  .add(other, 8)
                  .plan(100),
              (Batches{{0, 2}, {1, 3}}))
        << i;
  }
  EXPECT_TRUE(may_share_batch(allreduce("a"), allreduce("b", {9, 9})));
}

TEST(FusionPlanner, SomeKindsAlwaysGoAlone) {
  for (const auto kind : {OpKind::kGather, OpKind::kAlltoall, OpKind::kBarrier, OpKind::kJoin}) {
    wire::Request request = allreduce("a");
    request.kind = kind;
    EXPECT_FALSE(may_share_batch(request, request));
    EXPECT_EQ(Tensors().add(request, 0).add(request, 0).plan(100), (Batches{{0}, {1}}));
    EXPECT_EQ(Tensors()
                  .add(in_group(request, "g", 2, 0), 0)
                  .add(in_group(request, "g", 2, 1), 0)
                  .plan(100),
              (Batches{{0}, {1}}));
  }
}

TEST(FusionPlanner, AdasumWeighsEachTensorByItself) {
  wire::Request request = allreduce("a");
  request.op = ReduceOp::kAdasum;
  EXPECT_FALSE(may_share_batch(request, request));
  EXPECT_EQ(Tensors().add(request, 0).add(request, 0).plan(100), (Batches{{0}, {1}}));
}

TEST(FusionPlanner, AGroupStaysTogetherWhateverTheThreshold) {
  Tensors tensors;
  for (int i = 0; i < 3; ++i)
    tensors.add(in_group(allreduce(numbered("g", static_cast<std::uint64_t>(i))), "g", 3, i), 80);
  EXPECT_EQ(tensors.plan(100), (Batches{{0, 1, 2}}));
  EXPECT_EQ(tensors.plan(0), (Batches{{0, 1, 2}}));
}

TEST(FusionPlanner, TensorsBetweenTheMembersOfAGroupDoNotSplitIt) {
  const Tensors tensors = Tensors()
                              .add(in_group(allreduce("g0"), "g", 2, 0), 60)
                              .add(allreduce("x"), 30)
                              .add(allreduce("y"), 30)
                              .add(in_group(allreduce("g1"), "g", 2, 1), 60);
  EXPECT_EQ(tensors.plan(100), (Batches{{0, 3}, {1, 2}}));
  EXPECT_EQ(tensors.plan(150), (Batches{{0, 3, 1}, {2}}));
}

TEST(FusionPlanner, AGroupOfSeveralSortsHasABatchForEach) {
  wire::Request half = in_group(allreduce("b"), "g", 3, 1);
  half.dtype = DataType::kFloat16;
  EXPECT_EQ(Tensors()
                .add(in_group(allreduce("a"), "g", 3, 0), 80)
                .add(half, 80)
                .add(in_group(allreduce("c"), "g", 3, 2), 80)
                .plan(100),
            (Batches{{0, 2}, {1}}));
}

TEST(FusionPlanner, TwoGroupsShareABatchOnlyWhenBothFit) {
  Tensors tensors;
  for (const char* const group : {"g", "h"}) {
    for (int i = 0; i < 2; ++i)
      tensors.add(in_group(allreduce(numbered(group, static_cast<std::uint64_t>(i))), group, 2, i),
                  30);
  }
  EXPECT_EQ(tensors.plan(120), (Batches{{0, 1, 2, 3}}));
  EXPECT_EQ(tensors.plan(100), (Batches{{0, 1}, {2, 3}}));
}

TEST(FusionPlanner, HugeSizesDoNotOverflow) {
  constexpr auto kMaxInt64 = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(
      Tensors().add(allreduce("a"), kMaxInt64).add(allreduce("b"), kMaxInt64).plan(kMaxInt64 - 1),
      (Batches{{0}, {1}}));
}

TEST(FusionPlanner, NothingInNothingOut) { EXPECT_TRUE(Tensors().plan(100).empty()); }

TEST(FusionPlanner, EveryTensorIsInOneBatchOfItsSortWithinTheThreshold) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 300; ++round) {
    Tensors tensors;
    const auto count = random() % 30;
    for (std::size_t i = 0; i < count; ++i) {
      wire::Request request = allreduce(numbered("t", static_cast<std::uint64_t>(i)));
      request.dtype = random() % 2 == 0 ? DataType::kFloat32 : DataType::kInt64;
      tensors.add(request, static_cast<std::int64_t>(random() % 60));
    }
    std::vector<std::size_t> seen;
    const Batches batches = tensors.plan(100);
    EXPECT_EQ(batches, tensors.plan(100));
    for (const auto& batch : batches) {
      std::int64_t bytes = 0;
      for (const auto i : batch) {
        bytes += tensors.bytes(i);
        EXPECT_EQ(tensors.requests()[i].dtype, tensors.requests()[batch.front()].dtype);
      }
      EXPECT_LE(bytes, 100);
      EXPECT_TRUE(std::is_sorted(batch.begin(), batch.end()));
      seen.insert(seen.end(), batch.begin(), batch.end());
    }
    std::sort(seen.begin(), seen.end());
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(seen.at(i), i);
    EXPECT_EQ(seen.size(), count);
  }
}

}  // namespace
}  // namespace hvd::control
