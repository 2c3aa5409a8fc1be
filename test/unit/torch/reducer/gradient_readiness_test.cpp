#include "reducer/gradient_readiness.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace hvd::libtorch {
namespace {

using Indices = std::vector<std::size_t>;

class GradientReadinessTest : public ::testing::Test {
 protected:
  GradientReadinessTest() { readiness.set_units({{0}, {1, 2}, {3}}); }

  Indices submitted() const { return {readiness.submitted().begin(), readiness.submitted().end()}; }

  std::vector<bool> expected = {true, true, true, true};
  GradientReadiness readiness{4, 1, [this](std::size_t i) { return expected[i]; }};
};

TEST_F(GradientReadinessTest, AUnitIsReadyWithItsLastGradientWhicheverThatIs) {
  for (const auto& [first, last] : {std::pair{1, 2}, std::pair{2, 1}}) {
    EXPECT_FALSE(readiness.unit_ready(1));
    readiness.mark_ready(static_cast<std::size_t>(first), false);
    EXPECT_FALSE(readiness.unit_ready(1));
    readiness.mark_ready(static_cast<std::size_t>(last), false);
    EXPECT_TRUE(readiness.unit_ready(1));
    EXPECT_FALSE(readiness.unit_ready(0));
    readiness.end_cycle();
  }
}

TEST_F(GradientReadinessTest, WhatIsNotExpectedHoldsNothingUp) {
  expected[1] = false;
  readiness.mark_ready(2, false);
  EXPECT_TRUE(readiness.unit_ready(1));
  readiness.mark_submitted(1);
  EXPECT_EQ(submitted(), Indices{2});
  EXPECT_FALSE(readiness.marked_ready(1));

  readiness.end_cycle();
  readiness.mark_ready(2, false);
  EXPECT_TRUE(readiness.unit_ready(1));
  expected[1] = true;
  readiness.recheck_expected();
  EXPECT_FALSE(readiness.unit_ready(1));
  readiness.mark_ready(1, false);
  EXPECT_TRUE(readiness.unit_ready(1));
}

TEST_F(GradientReadinessTest, KnowsTheLikelyNextGradientOfAUnit) {
  EXPECT_EQ(readiness.likely_next(1, 0), 1U);
  EXPECT_EQ(readiness.likely_next(1, 1), 2U);
  EXPECT_EQ(readiness.likely_next(1, 2), std::nullopt);
  readiness.mark_ready(1, false);
  EXPECT_EQ(readiness.likely_next(1, 0), 2U);
  readiness.mark_ready(2, false);
  EXPECT_EQ(readiness.likely_next(1, 0), std::nullopt);
}

TEST_F(GradientReadinessTest, WaitsForNewlyExpectedGradientsAfterAnUpdate) {
  expected[1] = false;
  EXPECT_FALSE(readiness.unit_ready(1));
  expected[1] = true;
  readiness.recheck_expected();
  readiness.mark_ready(2, false);
  EXPECT_FALSE(readiness.unit_ready(1));
}

TEST_F(GradientReadinessTest, AHeldGradientIsLeftForSynchronize) {
  readiness.mark_ready(1, true);
  readiness.mark_ready(2, false);
  EXPECT_TRUE(readiness.marked_ready(1));
  EXPECT_FALSE(readiness.unit_ready(1));
  EXPECT_EQ(readiness.units_left(), (Indices{0, 1, 2}));
}

TEST_F(GradientReadinessTest, AWithdrawnGradientMayComeAgain) {
  readiness.mark_ready(1, false);
  readiness.mark_ready(2, false);
  EXPECT_TRUE(readiness.unit_ready(1));
  readiness.withdraw(1);
  EXPECT_FALSE(readiness.marked_ready(1));
  EXPECT_FALSE(readiness.unit_ready(1));
  readiness.mark_ready(1, false);
  EXPECT_TRUE(readiness.unit_ready(1));
  readiness.mark_submitted(1);
  EXPECT_EQ(readiness.order_of_arrival(), (Indices{1, 2}));
}

TEST_F(GradientReadinessTest, CountsTheBackwardPassesOfEachGradient) {
  EXPECT_TRUE(readiness.count_pass(0));
  readiness.set_passes_per_step(3);
  EXPECT_EQ(readiness.passes_per_step(), 3);
  EXPECT_FALSE(readiness.count_pass(0));
  EXPECT_TRUE(readiness.count_pass(0));
  EXPECT_FALSE(readiness.count_pass(1)) << "the passes of gradient 0 do not count for gradient 1";
  EXPECT_FALSE(readiness.count_pass(1));
  readiness.forget_passes(1);
  EXPECT_FALSE(readiness.count_pass(1));
  EXPECT_FALSE(readiness.count_pass(1));
  EXPECT_TRUE(readiness.count_pass(1));
}

TEST_F(GradientReadinessTest, KnowsTheLastUnitOfACycle) {
  readiness.mark_ready(0, false);
  readiness.mark_submitted(0);
  readiness.mark_ready(3, false);
  EXPECT_FALSE(readiness.last_unit(2)) << "gradients 1 and 2 are not ready yet";
  readiness.mark_submitted(2);
  EXPECT_TRUE(readiness.last_unit(1));
  expected[1] = expected[2] = false;
  EXPECT_TRUE(readiness.last_unit(0)) << "unexpected gradients are not waited for";
}

TEST_F(GradientReadinessTest, AReadyGradientIsLeftOverUntilItsUnitIsSubmitted) {
  for (const std::size_t i : {0, 1, 2, 3}) readiness.mark_ready(i, false);
  readiness.mark_submitted(0);
  EXPECT_FALSE(readiness.last_unit(2));
}

TEST_F(GradientReadinessTest, ReturnsTheRemainingUnitsAndTheOrderOfTheOthers) {
  EXPECT_FALSE(readiness.in_cycle());
  readiness.mark_ready(3, false);
  EXPECT_TRUE(readiness.in_cycle());
  readiness.mark_submitted(2);
  readiness.mark_ready(1, false);
  EXPECT_TRUE(readiness.in_cycle());
  EXPECT_EQ(readiness.units_left(), (Indices{0, 1}));
  readiness.mark_submitted(0);
  readiness.mark_submitted(1);
  EXPECT_TRUE(readiness.units_left().empty());
  EXPECT_EQ(submitted(), (Indices{3, 0, 1, 2}));
  EXPECT_EQ(readiness.order_of_arrival(), (Indices{3, 1, 0, 2})) << "0 and 2 had no gradient";
}

TEST_F(GradientReadinessTest, ACycleWithoutAGradientIsOneOnceSomethingIsSubmitted) {
  readiness.mark_submitted(0);
  EXPECT_TRUE(readiness.in_cycle());
}

TEST_F(GradientReadinessTest, NothingOfACycleIsLeftInTheNext) {
  readiness.set_passes_per_step(2);
  readiness.count_pass(0);
  for (const std::size_t i : {0, 1, 2}) readiness.mark_ready(i, false);
  EXPECT_TRUE(readiness.unit_ready(1));
  readiness.mark_submitted(1);
  readiness.set_reduced(true);
  EXPECT_EQ(readiness.cycles(), 0U);

  readiness.end_cycle();
  EXPECT_EQ(readiness.cycles(), 1U);
  EXPECT_FALSE(readiness.reduced());
  EXPECT_FALSE(readiness.in_cycle());
  EXPECT_TRUE(submitted().empty());
  EXPECT_TRUE(readiness.order_of_arrival().empty());
  EXPECT_EQ(readiness.units_left(), (Indices{0, 1, 2}));
  EXPECT_FALSE(readiness.count_pass(0));
  for (const std::size_t i : {0, 1, 2}) EXPECT_FALSE(readiness.marked_ready(i)) << i;
  for (const std::size_t u : {0, 1, 2}) EXPECT_FALSE(readiness.unit_ready(u)) << u;
}

TEST_F(GradientReadinessTest, OtherUnitsLeaveGradientsAsTheyAre) {
  readiness.set_passes_per_step(2);
  readiness.count_pass(2);
  readiness.mark_ready(0, false);
  readiness.set_units({{3, 2}, {1, 0}});
  EXPECT_EQ(readiness.unit_of(0), 1U);
  EXPECT_EQ(readiness.unit_of(3), 0U);
  EXPECT_EQ(readiness.units_left(), (Indices{0, 1}));
  EXPECT_TRUE(readiness.marked_ready(0));
  EXPECT_TRUE(readiness.count_pass(2));
  readiness.mark_ready(1, false);
  EXPECT_TRUE(readiness.unit_ready(1));
  EXPECT_FALSE(readiness.unit_ready(0));
}

TEST_F(GradientReadinessTest, IsReducedUntilSomethingComesIn) {
  EXPECT_FALSE(readiness.reduced());
  readiness.set_reduced(true);
  EXPECT_TRUE(readiness.reduced());
  readiness.set_reduced(false);
  EXPECT_FALSE(readiness.reduced());
}

}  // namespace
}  // namespace hvd::libtorch
