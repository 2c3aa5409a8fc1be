// Tests the handling of one gradient, without the operation that reduces it.
#include "reducer/reduced_parameter.h"

#include <algorithm>

#include "reducer/gradient_units.h"
#include "torch/reducer/parts.h"

namespace hvd::testing {
namespace {

using libtorch::GradientBucket;
using libtorch::GradientReduction;
using libtorch::ReducedParameter;

class ReducedParameterTest : public ::testing::Test {
 protected:
  static float* values_of(const Submission& submission) {
    return reinterpret_cast<float*>(submission.output.data);
  }
  /// Stands for the reduction.
  static void overwrite(const Submission& submission, float value) {
    std::fill_n(values_of(submission), 3, value);
  }

  const torch::NoGradGuard no_grad;
  const GradientReduction how = sums("reduced");
  torch::Tensor parameter = torch::ones({3}, torch::requires_grad());
  ReducedParameter reduced = testing::reduced("p", parameter, how);
};

TEST_F(ReducedParameterTest, ReducesAGradientInItsPlace) {
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  const auto submissions = reduced.prepare(how);
  const torch::Tensor gradient = parameter.grad();
  ASSERT_EQ(submissions.size(), 1U);
  EXPECT_EQ(values_of(submissions[0]), gradient.data_ptr());
  overwrite(submissions[0], 7);
  reduced.complete(true);
  EXPECT_TRUE(parameter.grad().is_same(gradient));
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(ReducedParameterTest, WritesTheResultToThePresentGradient) {
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  const auto submissions = reduced.prepare(how);
  parameter.mutable_grad() = torch::full({3}, 1.0F);
  overwrite(submissions[0], 7);
  reduced.complete(true);
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(ReducedParameterTest, ZerosBecomeAGradientOnlyIfSomeRankHasOne) {
  for (const bool used : {false, true}) {
    const auto submissions = reduced.prepare(how);
    ASSERT_EQ(submissions.size(), 1U);
    EXPECT_EQ(values_of(submissions[0])[2], 0.0F);
    overwrite(submissions[0], 7);
    reduced.complete(used);
    ASSERT_EQ(parameter.grad().defined(), used);
  }
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(ReducedParameterTest, ZerosBecomeAGradientWithTheStridesOfTheParameter) {
  const torch::Tensor transposed = torch::ones({2, 3}).t().set_requires_grad(true);
  ReducedParameter other = testing::reduced("transposed", transposed, how);
  const auto submissions = other.prepare(how);
  for (int i = 0; i < 6; ++i) values_of(submissions[0])[i] = static_cast<float>(i);
  other.complete(true);
  EXPECT_EQ(transposed.grad().strides(), transposed.strides());
  EXPECT_TRUE(near(transposed.grad(), torch::arange(6, torch::kFloat32).view({3, 2})));
}

TEST_F(ReducedParameterTest, AGradientThatWasResetStaysSo) {
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  const auto submissions = reduced.prepare(how);
  parameter.mutable_grad().reset();
  reduced.complete(true);
  EXPECT_FALSE(parameter.grad().defined());
}

TEST_F(ReducedParameterTest, SendsACopyOfMemoryThatTwoGradientsShare) {
  const torch::Tensor both = torch::full({3}, 5.0F);
  parameter.mutable_grad() = both.view({3});
  reduced.detect_sharing({});
  const auto submissions = reduced.prepare(how);
  EXPECT_NE(values_of(submissions[0]), both.data_ptr());
  overwrite(submissions[0], 7);
  reduced.complete(true);
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(ReducedParameterTest, DetectsWritesToAGuardedGradient) {
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  EXPECT_FALSE(reduced.release()) << "nothing was guarded";
  reduced.guard();
  EXPECT_THROW(parameter.grad().data(), UsageError);
  EXPECT_FALSE(reduced.release());
  EXPECT_NO_THROW(parameter.grad().data());
  reduced.guard();
  parameter.mutable_grad().mul_(2);
  EXPECT_TRUE(reduced.release());
  EXPECT_FALSE(reduced.release());
}

TEST_F(ReducedParameterTest, MovesIntoItsViewAndIsZerosThereWithoutAGradient) {
  const torch::Tensor other = torch::ones({5}, torch::requires_grad());
  const torch::Tensor both[] = {other, parameter};
  GradientBucket bucket("b", how, both);
  reduced.set_view(bucket.view(1));

  parameter.mutable_grad() = torch::full({3}, 5.0F);
  reduced.place(how);
  EXPECT_EQ(parameter.grad().data_ptr(), bucket.view(1).data_ptr());
  EXPECT_TRUE(near(bucket.view(1), torch::full({3}, 5.0F)));
  reduced.complete(true);
  EXPECT_EQ(parameter.grad().data_ptr(), bucket.view(1).data_ptr());

  parameter.mutable_grad().reset();
  reduced.place(how);
  EXPECT_TRUE(near(bucket.view(1), torch::zeros({3}))) << "what was there before does not count";
  EXPECT_FALSE(parameter.grad().defined());
  bucket.view(1).fill_(7);
  reduced.complete(false);
  EXPECT_FALSE(parameter.grad().defined());
  reduced.place(how);
  bucket.view(1).fill_(7);
  reduced.complete(true);
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(ReducedParameterTest, TakesAGradientThatItCanCopyIntoItsView) {
  const torch::Tensor gradient = torch::full({3}, 5.0F);
  EXPECT_FALSE(reduced.take(gradient)) << "there is no view";
  GradientBucket bucket("b", how, {&parameter, 1});
  reduced.set_view(bucket.view(0));
  const torch::Tensor others[] = {torch::Tensor(),
                                  gradient.to(torch::kFloat64),
                                  gradient.to_sparse(),
                                  torch::full({1}, 5.0F).expand({3}),
                                  torch::_efficientzerotensor({3}),
                                  torch::full({3}, 5.0F, torch::requires_grad())};
  for (const torch::Tensor& other : others) EXPECT_FALSE(reduced.take(other));
  EXPECT_FALSE(parameter.grad().defined());

  EXPECT_TRUE(reduced.take(gradient));
  EXPECT_TRUE(parameter.grad().is_same(bucket.view(0)));
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 5.0F)));
  EXPECT_FALSE(reduced.take(gradient)) << "autograd has to add";
  reduced.place(how);
  EXPECT_TRUE(parameter.grad().is_same(bucket.view(0)));
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 5.0F)));
}

TEST_F(ReducedParameterTest, AReplacementOfAViewGetsTheResult) {
  GradientBucket bucket("b", how, {&parameter, 1});
  reduced.set_view(bucket.view(0));
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  reduced.place(how);
  parameter.mutable_grad() = torch::full({3}, 1.0F);
  bucket.view(0).fill_(7);
  reduced.complete(true);
  EXPECT_NE(parameter.grad().data_ptr(), bucket.view(0).data_ptr());
  EXPECT_TRUE(near(parameter.grad(), torch::full({3}, 7.0F)));
}

TEST_F(ReducedParameterTest, ReturnsTheSentLayoutUntilItIsDropped) {
  EXPECT_EQ(reduced.own_layout(), std::nullopt);
  parameter.mutable_grad() = torch::full({3}, 5.0F);
  EXPECT_EQ(reduced.own_layout(), 0);
  reduced.prepare(how);
  parameter.mutable_grad().reset();
  EXPECT_EQ(reduced.own_layout(), 0);
  reduced.drop();
  EXPECT_EQ(reduced.own_layout(), std::nullopt);
}

}  // namespace
}  // namespace hvd::testing
