#include "reducer/gradient_exchange.h"

#include <algorithm>

#include "torch/reducer/parts.h"

namespace hvd::testing {
namespace {

using libtorch::GradientExchange;
using libtorch::GradientReadiness;
using libtorch::GradientReduction;
using libtorch::GradientUnits;
using libtorch::ParameterCheck;
using libtorch::RankAgreement;
using libtorch::ReducedParameter;

/// Four parameters and the parts that an exchange needs, without hooks. The first three are small
/// and lie in one bucket, if there are buckets.
class Step {
 public:
  explicit Step(const GradientReduction& reduction)
      : how(reduction), parameters(reduced({16, 16, 16, 1024}, how)) {
    readiness.set_units(units.members());
    if (how.bucket_views && units.learn({2, 1, 0, 3})) readiness.set_units(units.members());
  }

  const torch::Tensor& gradient(std::size_t i) const { return parameters[i].tensor().grad(); }
  ::testing::AssertionResult gradient_is(std::size_t i, float value) const {
    if (!gradient(i).defined()) return ::testing::AssertionFailure() << "there is none";
    return near(gradient(i), torch::full_like(parameters[i].tensor(), value).detach());
  }
  /// Sets this rank's gradient to `factor` * (rank + 1).
  void set(std::size_t i, float factor = 1) {
    const torch::NoGradGuard no_grad;
    set_gradient(parameters[i],
                 torch::full_like(parameters[i].tensor(), factor * static_cast<float>(rank() + 1)));
  }
  /// Does the same as the reducer after autograd has accumulated the gradient.
  void produce(std::size_t i, float factor = 1) {
    set(i, factor);
    ReducedParameter& parameter = parameters[i];
    if (parameter.view().defined()) parameter.place(how);
    parameter.guard();
    readiness.mark_ready(i, false);
    if (readiness.unit_ready(readiness.unit_of(i))) exchange.submit(readiness.unit_of(i));
  }
  void finish() {
    reduce();
    EXPECT_TRUE(exchange.succeeded());
    exchange.raise_if_error();
    exchange.check_parameters();
    exchange.raise_if_written();
    exchange.complete();
    end_cycle();
  }
  void reduce() {
    exchange.submit_rest();
    exchange.wait();
  }
  void end_cycle() {
    exchange.end_cycle();
    units.end_cycle();
    readiness.end_cycle();
  }
  bool left(std::size_t i) const {
    const auto units_left = readiness.units_left();
    return std::count(units_left.begin(), units_left.end(), readiness.unit_of(i)) > 0;
  }

  const GradientReduction how;
  std::vector<ReducedParameter> parameters;
  GradientReadiness readiness{4, 1, [this](std::size_t i) { return parameters[i].active(); }};
  RankAgreement agreement{how, parameters};
  GradientUnits units{how, parameters, agreement};
  ParameterCheck check{how,
                       {"p0", "p1", "p2", "p3"},
                       {parameters[0].tensor(), parameters[1].tensor(), parameters[2].tensor(),
                        parameters[3].tensor()}};
  libtorch::GradientWeights weights{how.wrapper, how.scope, how.process_set.ranks(),
                                    how.process_set.rank()};
  GradientExchange exchange{how, parameters, units, readiness, check, weights};
};

GradientReduction reduction(const std::string& scope, bool buckets) {
  GradientReduction how = sums("exchange." + scope + (buckets ? ".buckets" : ""));
  how.bucket_views = buckets;
  how.sparse = libtorch::SparseGradients::kMakeDense;
  how.check_every = 1;
  return how;
}

class GradientExchangeTest : public ::testing::TestWithParam<bool> {
 protected:
  const GradientReduction how =
      reduction(::testing::UnitTest::GetInstance()->current_test_info()->name(), GetParam());
  Step step{how};
};

TEST_P(GradientExchangeTest, ReducesCommonGradientsInEveryCycle) {
  for (const float cycle : {1.0F, 2.0F, 3.0F}) {
    for (const std::size_t i : {0, 1, 2, 3}) step.produce(i, cycle + static_cast<float>(i));
    step.finish();
    for (const std::size_t i : {0, 1, 2, 3})
      EXPECT_TRUE(step.gradient_is(i, (cycle + static_cast<float>(i)) * sum_of_ranks())) << i;
  }
}

TEST_P(GradientExchangeTest, GradientsOfNoRankStayUndefinedAndThoseOfOneAreShared) {
  for (const float cycle : {1.0F, 2.0F}) {
    step.produce(3, cycle);
    step.produce(0, cycle);
    if (rank() == 0) step.produce(1, cycle);
    step.finish();
    EXPECT_TRUE(step.gradient_is(3, cycle * sum_of_ranks()));
    EXPECT_TRUE(step.gradient_is(0, cycle * sum_of_ranks()));
    EXPECT_TRUE(step.gradient_is(1, cycle));
    EXPECT_FALSE(step.gradient(2).defined());
    for (const ReducedParameter& parameter : step.parameters) set_gradient(parameter, {});
  }
}

TEST_P(GradientExchangeTest, SubmitsZerosInPlaceOfOldGradients) {
  for (const std::size_t i : {0, 1, 2, 3}) step.produce(i);
  step.finish();
  set_gradient(step.parameters[1], {});
  if (rank() == 0) step.produce(1);
  step.finish();
  EXPECT_TRUE(step.gradient_is(1, 1));
}

TEST_P(GradientExchangeTest, AGradientThatWasNotReadyGoesWithTheRest) {
  step.set(1, 5);  // as under no_sync()
  step.produce(0);
  step.finish();
  EXPECT_TRUE(step.gradient_is(1, 5 * sum_of_ranks()));
}

TEST_P(GradientExchangeTest, FrozenParametersAreLeftOut) {
  step.parameters[1].tensor().set_requires_grad(false);
  step.set(1, 5);
  for (const std::size_t i : {0, 2}) step.produce(i);
  EXPECT_FALSE(step.left(0));
  EXPECT_FALSE(step.left(2));
  step.finish();
  EXPECT_TRUE(step.gradient_is(1, 5 * static_cast<float>(rank() + 1)));
  EXPECT_TRUE(step.gradient_is(2, sum_of_ranks()));
}

TEST_P(GradientExchangeTest, NoUnitIsLeftWhenAllGradientsHaveArrived) {
  for (const std::size_t i : {3, 2, 1, 0}) step.produce(i);
  EXPECT_TRUE(step.readiness.units_left().empty());
  step.exchange.wait();
  const std::uint64_t before = metrics().completed_operations;
  step.reduce();
  EXPECT_EQ(metrics().completed_operations, before) << "flags travel with the last gradient";
  step.finish();
}

TEST_P(GradientExchangeTest, AGradientThatIsWrittenToMeanwhileIsAnError) {
  for (const std::size_t i : {0, 1, 2}) step.produce(i);
  step.parameters[1].tensor().mutable_grad().mul_(2);
  step.reduce();
  const std::string message = message_of<UsageError>([&] { step.exchange.raise_if_written(); });
  EXPECT_TRUE(contains(message, "'p1' was written to")) << message;
  step.end_cycle();
  step.produce(1);
  step.finish();
  EXPECT_TRUE(step.gradient_is(1, sum_of_ranks()));
}

TEST_P(GradientExchangeTest, AnOperationThatFailsIsAnError) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  GradientReduction other = reduction("fails", GetParam());
  other.op = rank() == 0 ? ReduceOp::kSum : ReduceOp::kAverage;
  Step wrong(other);
  wrong.produce(0);
  wrong.reduce();
  EXPECT_FALSE(wrong.exchange.succeeded());
  EXPECT_THROW(wrong.exchange.raise_if_error(), MismatchError);
  wrong.end_cycle();
  EXPECT_TRUE(wrong.exchange.succeeded()) << "nothing is under way";
}

TEST_P(GradientExchangeTest, ADroppedCycleLeavesGradientsToTheProgram) {
  step.produce(0);
  step.reduce();
  EXPECT_THROW(step.gradient(0).data(), UsageError);
  step.end_cycle();
  EXPECT_NO_THROW(step.gradient(0).data());
  set_gradient(step.parameters[0], {});
  EXPECT_EQ(step.parameters[0].own_layout(), std::nullopt) << "what was sent is forgotten";
  step.finish();
  for (const std::size_t i : {0, 1, 2, 3}) EXPECT_FALSE(step.gradient(i).defined()) << i;
}

TEST_P(GradientExchangeTest, ParametersThatDifferAreAnErrorOnEveryRank) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot differ";
  if (rank() == 0) step.parameters[1].tensor().detach().mul_(2);
  step.produce(0);
  step.reduce();
  const std::string message = message_of<DivergedError>([&] { step.exchange.check_parameters(); });
  EXPECT_TRUE(contains(message, "'p1' differs on")) << message;
  EXPECT_TRUE(contains(message, "before the first update")) << message;
  step.end_cycle();
}

INSTANTIATE_TEST_SUITE_P(WithAndWithoutBuckets, GradientExchangeTest, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Buckets" : "OneByOne"; });

TEST(GradientExchange, MembersOfAGroupAreSubmittedTogether) {
  const GradientReduction how = reduction("group", false);
  Step step(how);
  for (const std::size_t i : {0, 2}) {
    const ReducedParameter& own = step.parameters[i];
    step.parameters[i] = reduced(own.name(), own.tensor(), how, 0);
  }
  GradientUnits units(how, step.parameters, step.agreement);
  step.readiness.set_units(units.members());
  GradientExchange exchange(how, step.parameters, units, step.readiness, step.check, step.weights);
  for (const std::size_t i : {0, 2}) step.set(i, static_cast<float>(i + 1));
  exchange.submit(step.readiness.unit_of(0));
  EXPECT_FALSE(step.left(0));
  EXPECT_FALSE(step.left(2));
  EXPECT_TRUE(step.left(1));
  exchange.submit_rest();
  exchange.wait();
  exchange.raise_if_error();
  exchange.check_parameters();
  exchange.raise_if_written();
  exchange.complete();
  for (const std::size_t i : {0, 2})
    EXPECT_TRUE(step.gradient_is(i, static_cast<float>(i + 1) * sum_of_ranks())) << i;
  exchange.end_cycle();
}

TEST(GradientExchange, MembersOfAGroupFailTogether) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const GradientReduction how = reduction("group.fails", false);
  Step step(how);
  // The last member has another shape on rank 0.
  for (const std::size_t i : {0, 2}) {
    const torch::Tensor tensor = i == 2 && rank() == 0 ? torch::ones({17}, torch::requires_grad())
                                                       : step.parameters[i].tensor();
    step.parameters[i] = reduced(step.parameters[i].name(), tensor, how, 0);
  }
  GradientUnits units(how, step.parameters, step.agreement);
  step.readiness.set_units(units.members());
  GradientExchange exchange(how, step.parameters, units, step.readiness, step.check, step.weights);
  for (const std::size_t i : {0, 1, 2, 3}) step.set(i);
  exchange.submit_rest();
  exchange.wait();
  EXPECT_FALSE(exchange.succeeded());
  EXPECT_THROW(exchange.raise_if_error(), MismatchError);
  exchange.end_cycle();
  EXPECT_TRUE(step.gradient_is(0, static_cast<float>(rank() + 1))) << "it is in the group";
  EXPECT_TRUE(step.gradient_is(1, sum_of_ranks())) << "it is not";
}

TEST(GradientExchange, WithoutParametersThereIsNothingToDo) {
  const GradientReduction how = reduction("empty", false);
  GradientReadiness readiness(0, 1, [](std::size_t) { return true; });
  const RankAgreement agreement(how, {});
  GradientUnits units(how, {}, agreement);
  ParameterCheck check(how, {}, {});
  libtorch::GradientWeights weights{how.wrapper, how.scope, how.process_set.ranks(),
                                    how.process_set.rank()};
  GradientExchange exchange(how, {}, units, readiness, check, weights);
  exchange.submit_rest();
  exchange.wait();
  exchange.raise_if_error();
  exchange.check_parameters();
  exchange.complete();
  EXPECT_EQ(check.cycles(), 0U);
}

}  // namespace
}  // namespace hvd::testing
