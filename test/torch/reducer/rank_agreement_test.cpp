#include "reducer/rank_agreement.h"

#include "torch/reducer/parts.h"

namespace hvd::testing {
namespace {

using libtorch::GradientReduction;
using libtorch::RankAgreement;
using libtorch::ReducedParameter;
using libtorch::SparseGradients;

torch::Tensor sparse_gradient() {
  return torch::sparse_coo_tensor(torch::tensor({{1}}), torch::ones({1}), {3}, torch::kFloat32);
}

bool last() { return rank() == size() - 1; }

TEST(RankAgreement, SameParametersAreAgreedOn) {
  const GradientReduction how = sums("same");
  auto parameters = reduced({2, 3}, how);
  RankAgreement agreement(how, parameters);
  EXPECT_FALSE(agreement.same_parameters());
  agreement.compare_parameters();
  EXPECT_TRUE(agreement.same_parameters());
  agreement.end_cycle();
  EXPECT_TRUE(agreement.same_parameters());
}

TEST(RankAgreement, NamesTheFirstDifference) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot differ";
  const GradientReduction how = sums("differences");
  for (const int what : {0, 1, 2, 3}) {
    auto parameters = reduced({2, 3}, how);
    const auto replace = [&](const std::string& name, const torch::Tensor& tensor) {
      if (last()) parameters[1] = reduced(name, tensor, how);
    };
    const auto options = torch::TensorOptions().requires_grad(true);
    if (what == 0) replace("other", torch::ones({3}, options));
    if (what == 1) replace("p1", torch::ones({4}, options));
    if (what == 2) replace("p1", torch::ones({3}, options.dtype(torch::kFloat64)));
    if (what == 3 && last()) parameters[1].tensor().set_requires_grad(false);
    RankAgreement agreement(how, parameters);
    const std::string message = message_of<MismatchError>([&] { agreement.compare_parameters(); });
    EXPECT_TRUE(contains(message, "parameter 1 differs: rank 0 has 'p1' [3] Float")) << message;
    EXPECT_FALSE(agreement.same_parameters()) << what;
  }
}

TEST(RankAgreement, OptionsThatDifferAreNamed) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot differ";
  GradientReduction how = sums("options");
  how.check_every = last() ? 3 : 4;
  auto parameters = reduced({2}, how);
  RankAgreement agreement(how, parameters);
  const std::string message = message_of<MismatchError>([&] { agreement.compare_parameters(); });
  EXPECT_TRUE(contains(message, "check_every differs: rank 0 has 4")) << message;
}

/// Rank 0 has a dense gradient of p0. The last rank has sparse gradients of all parameters except
/// p2, which has no gradient.
class LayoutsTest : public ::testing::Test {
 protected:
  LayoutsTest() {
    how.sparse = SparseGradients::kReduceSparse;
    parameters = reduced({3, 3, 3}, how);
  }
  void set_gradients() {
    if (last()) set_gradient(parameters[0], sparse_gradient());
    if (last()) set_gradient(parameters[1], sparse_gradient());
    if (rank() == 0) set_gradient(parameters[0], torch::ones({3}));
  }

  GradientReduction how = sums("layouts");
  std::vector<ReducedParameter> parameters;
};

TEST_F(LayoutsTest, DenseWinsAndSparseHoldsForRanksWithoutAGradient) {
  RankAgreement own(how, parameters);
  set_gradients();
  EXPECT_TRUE(own.layouts_in_doubt());
  EXPECT_FALSE(own.waits_for_layout(parameters[2])) << "it has no gradient";
  EXPECT_EQ(own.waits_for_layout(parameters[1]), last());
  own.agree_on_layouts();
  EXPECT_EQ(parameters[0].agreed_layout(), 0);
  EXPECT_EQ(parameters[1].agreed_layout(), 1);
  EXPECT_EQ(parameters[2].agreed_layout(), std::nullopt) << "no rank has one yet";
  EXPECT_TRUE(own.layouts_in_doubt());
  EXPECT_FALSE(own.waits_for_layout(parameters[1]));
  own.end_cycle();
  EXPECT_EQ(parameters[1].agreed_layout(), 1) << "it was agreed on for good";
}

TEST_F(LayoutsTest, WithoutASparseOneAllAreDense) {
  RankAgreement own(how, parameters);
  if (rank() == 0) set_gradient(parameters[0], torch::ones({3}));
  own.agree_on_layouts();
  for (const ReducedParameter& parameter : parameters)
    EXPECT_EQ(parameter.agreed_layout(), 0) << parameter.name();
  EXPECT_FALSE(own.layouts_in_doubt());
}

TEST_F(LayoutsTest, AreNotAskedForWhereNoneIsSparse) {
  how.sparse = SparseGradients::kMakeDense;
  RankAgreement own(how, parameters);
  set_gradients();
  EXPECT_FALSE(own.layouts_in_doubt());
  EXPECT_FALSE(own.waits_for_layout(parameters[1]));
}

TEST_F(LayoutsTest, AreForgottenAfterACycleThatARankWasAbsentFrom) {
  if (size() == 1) GTEST_SKIP() << "no other rank is there while it is absent";
  RankAgreement own(how, parameters);
  if (rank() == 0) {
    join();
  } else {
    set_gradient(parameters[1], sparse_gradient());
    own.compare_parameters();
    EXPECT_FALSE(own.same_parameters()) << "the absent rank did not take part";
    own.agree_on_layouts();
    EXPECT_EQ(parameters[1].agreed_layout(), 1);
    own.end_cycle();
    EXPECT_EQ(parameters[1].agreed_layout(), std::nullopt);
    join();
  }
}

TEST(RankAgreement, TheOrderIsThatOfTheFirstRank) {
  const GradientReduction how = sums("order");
  auto parameters = reduced({2, 3, 4}, how);
  const RankAgreement agreement(how, parameters);
  const std::vector<std::size_t> own =
      rank() == 0 ? std::vector<std::size_t>{2, 0, 1} : std::vector<std::size_t>{0, 1, 2};
  const auto agreed = agreement.agree_on_order(own, /*shares_gradients=*/true);
  ASSERT_TRUE(agreed);
  EXPECT_EQ(agreed->order, (std::vector<std::size_t>{2, 0, 1}));
  EXPECT_TRUE(agreed->gradients_shared);
}

TEST(RankAgreement, GradientsAreSharedIfTheyAreOnEveryRank) {
  const GradientReduction how = sums("shared");
  auto parameters = reduced({2}, how);
  const RankAgreement agreement(how, parameters);
  const auto agreed = agreement.agree_on_order({0}, /*shares_gradients=*/!last());
  ASSERT_TRUE(agreed);
  EXPECT_FALSE(agreed->gradients_shared);
}

TEST(RankAgreement, ThereIsNoOrderIfParametersLieOtherwiseInMemory) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot differ";
  const GradientReduction how = sums("strides");
  const torch::Tensor plain = torch::ones({2, 3});
  const torch::Tensor turned = torch::ones({3, 2}).t();
  std::vector<ReducedParameter> parameters = {
      reduced("p", (last() ? turned : plain).detach().requires_grad_(), how)};
  const RankAgreement agreement(how, parameters);
  EXPECT_FALSE(agreement.agree_on_order({0}, /*shares_gradients=*/false));
}

TEST(RankAgreement, AllRanksMustAgree) {
  const GradientReduction how = sums("all");
  const RankAgreement agreement(how, {});
  EXPECT_TRUE(agreement.on_all_ranks(true, "question"));
  EXPECT_FALSE(agreement.on_all_ranks(!last(), "question"));
}

}  // namespace
}  // namespace hvd::testing
