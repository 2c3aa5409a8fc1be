// One gradient's way, without the operation that reduces it.
#include "optimizer/gradient_transfer.h"

#include <algorithm>

#include "optimizer/gradient_bucket.h"
#include "torch/optimizer/parts.h"

namespace hvd::testing {
namespace {

using libtorch::GradientBucket;
using libtorch::GradientReduction;
using libtorch::GradientTransfer;

class GradientTransferTest : public ::testing::Test {
 protected:
  static float* values_of(const Submission& submission) {
    return reinterpret_cast<float*>(submission.output.data);
  }
  /// Stands for the reduction.
  static void overwrite(const Submission& submission, float value) {
    std::fill_n(values_of(submission), 3, value);
  }

  const GradientReduction how = sums("transfer");
  torch::Tensor parameter = torch::ones({3}, torch::requires_grad());
  GradientTransfer transfer{parameter};
};

TEST_F(GradientTransferTest, ReducesAGradientInItsPlace) {
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  const torch::Tensor gradient = parameter.grad();
  const auto submissions = transfer.prepare("p", how);
  ASSERT_EQ(submissions.size(), 1U);
  EXPECT_EQ(values_of(submissions[0]), gradient.data_ptr());
  overwrite(submissions[0], 7);
  transfer.complete(true);
  EXPECT_TRUE(parameter.grad().is_same(gradient));
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(GradientTransferTest, BringsTheResultToWhatIsTheGradientByNow) {
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  const auto submissions = transfer.prepare("p", how);
  parameter.mutable_grad() = torch::full({3}, 1.0F);
  overwrite(submissions[0], 7);
  transfer.complete(true);
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(GradientTransferTest, ZerosBecomeAGradientOnlyIfSomeRankHasOne) {
  for (const bool used : {false, true}) {
    const auto submissions = transfer.prepare("p", how);
    ASSERT_EQ(submissions.size(), 1U);
    EXPECT_EQ(values_of(submissions[0])[2], 0.0F);
    overwrite(submissions[0], 7);
    transfer.complete(used);
    ASSERT_EQ(parameter.grad().defined(), used);
  }
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(GradientTransferTest, AGradientThatWasResetStaysSo) {
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  const auto submissions = transfer.prepare("p", how);
  parameter.mutable_grad().reset();
  transfer.complete(true);
  EXPECT_FALSE(parameter.grad().defined());
}

TEST_F(GradientTransferTest, SendsACopyOfMemoryThatTwoGradientsShare) {
  const torch::Tensor both = torch::full({3}, 5.0F);
  parameter.mutable_grad() = both.view({3});
  transfer.note_sharing({});
  const auto submissions = transfer.prepare("p", how);
  EXPECT_NE(values_of(submissions[0]), both.data_ptr());
  overwrite(submissions[0], 7);
  transfer.complete(true);
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(GradientTransferTest, NoticesWhatIsWrittenToAGuardedGradient) {
  const std::string name = "p";
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  EXPECT_FALSE(transfer.release()) << "nothing was guarded";
  transfer.guard(name);
  EXPECT_THROW(parameter.grad().data(), UsageError);
  EXPECT_FALSE(transfer.release());
  EXPECT_NO_THROW(parameter.grad().data());
  transfer.guard(name);
  parameter.mutable_grad().mul_(2);
  EXPECT_TRUE(transfer.release());
  EXPECT_FALSE(transfer.release());
}

TEST_F(GradientTransferTest, MovesIntoItsViewAndIsZerosThereWithoutAGradient) {
  const torch::Tensor other = torch::ones({5}, torch::requires_grad());
  const torch::Tensor both[] = {other, parameter};
  GradientBucket bucket("b", how, both);
  transfer.set_view(bucket.view(1));

  parameter.mutable_grad() = torch::full({3}, 5.0F);
  transfer.place("p", how);
  EXPECT_EQ(parameter.grad().data_ptr(), bucket.view(1).data_ptr());
  EXPECT_TRUE(near(bucket.view(1), torch::full({3}, 5.0F)));
  transfer.complete(true);
  EXPECT_EQ(parameter.grad().data_ptr(), bucket.view(1).data_ptr());

  parameter.mutable_grad().reset();
  transfer.place("p", how);
  EXPECT_TRUE(near(bucket.view(1), torch::zeros({3}))) << "what was there before does not count";
  EXPECT_FALSE(parameter.grad().defined());
  bucket.view(1).fill_(7);
  transfer.complete(false);
  EXPECT_FALSE(parameter.grad().defined());
  transfer.place("p", how);
  bucket.view(1).fill_(7);
  transfer.complete(true);
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(GradientTransferTest, WhatTakesThePlaceOfAViewGetsTheResult) {
  GradientBucket bucket("b", how, {&parameter, 1});
  transfer.set_view(bucket.view(0));
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  transfer.place("p", how);
  parameter.mutable_grad() = torch::full({3}, 1.0F);
  bucket.view(0).fill_(7);
  transfer.complete(true);
  EXPECT_NE(parameter.grad().data_ptr(), bucket.view(0).data_ptr());
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(GradientTransferTest, TellsTheLayoutOfWhatWasSentUntilItIsDropped) {
  EXPECT_EQ(transfer.own_layout(), std::nullopt);
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  EXPECT_EQ(transfer.own_layout(), 0);
  transfer.prepare("p", how);
  parameter.mutable_grad().reset();
  EXPECT_EQ(transfer.own_layout(), 0);
  transfer.drop();
  EXPECT_EQ(transfer.own_layout(), std::nullopt);
}

}  // namespace
}  // namespace hvd::testing
