#include "negotiation/coordinator.h"

#include <gtest/gtest.h>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

class RepeatedPlanTest : public ::testing::Test {
 protected:
  RepeatedPlanTest() {
    for (const char* name : {"a", "b", "c"}) cache_.put({allreduce(name), {}}, 1);
  }
  static wire::StampedHits hits(const std::vector<std::uint32_t>& slots,
                                std::uint64_t report_number = 1) {
    return {report_number, wire::SlotSet(slots)};
  }
  static wire::Plan plan_for(const std::vector<std::uint32_t>& slots) {
    wire::Plan plan;
    plan.sequence = 3;
    plan.batches.emplace_back();
    for (const auto slot : slots) plan.batches.back().tensors.emplace_back(wire::SlotUse{slot});
    return plan;
  }
  void learn(const std::vector<std::uint32_t>& slots) {
    EXPECT_FALSE(repeated_.offer(hits(slots)));
    repeated_.learn(plan_for(slots), /*nothing_pending=*/true);
  }
  /// The slot that the cache gives up next.
  std::uint32_t oldest() {
    std::uint32_t slot = 0;
    if (const auto displaced = cache_.put({allreduce("new"), {}}, 1)) slot = *displaced;
    return slot;
  }

  ResponseCache cache_{3};
  RepeatedPlan repeated_;
};

TEST_F(RepeatedPlanTest, ThePlanForTheSameSlotsIsGivenAgainUnderAnotherNumber) {
  EXPECT_FALSE(repeated_.offer(hits({0, 2})));
  EXPECT_TRUE(repeated_.learning());
  EXPECT_FALSE(repeated_.waiting());
  repeated_.learn(plan_for({0, 2}), true);
  EXPECT_FALSE(repeated_.learning());
  ASSERT_TRUE(repeated_.offer(hits({0, 2}, 2)));
  EXPECT_TRUE(repeated_.waiting());
  EXPECT_EQ(repeated_.plan().batches, plan_for({0, 2}).batches);
  EXPECT_EQ(repeated_.slots(), wire::SlotSet({0, 2}));
  wire::Plan expected = plan_for({0, 2});
  expected.sequence = 300;
  EXPECT_EQ(repeated_.repeat(300, cache_), expected);
  EXPECT_EQ(repeated_.encode(expected), wire::encode(expected));
  EXPECT_FALSE(repeated_.waiting());
}

TEST_F(RepeatedPlanTest, OtherPlansAreEncodedAsTheyAre) {
  wire::Plan other = plan_for({1});
  other.sequence = 7;
  EXPECT_EQ(repeated_.encode(other), wire::encode(other)) << "no plan is known yet";
  learn({0, 2});
  ASSERT_TRUE(repeated_.offer(hits({0, 2})));
  wire::Plan repeated = repeated_.repeat(8, cache_);
  EXPECT_EQ(repeated_.encode(other), wire::encode(other));
  repeated.replay = {{{0}}, {{2}}};
  EXPECT_EQ(repeated_.encode(repeated), wire::encode(repeated));
  other.sequence = 8;
  learn({1});
  EXPECT_EQ(repeated_.encode(other), wire::encode(other)) << "the known plan was not repeated yet";
}

TEST_F(RepeatedPlanTest, OtherSlotsAreLearntAnew) {
  learn({0, 2});
  EXPECT_FALSE(repeated_.offer(hits({0, 1})));
  EXPECT_TRUE(repeated_.learning());
  repeated_.learn(plan_for({0, 1}), true);
  EXPECT_FALSE(repeated_.offer(hits({0, 2})));
}

TEST_F(RepeatedPlanTest, WaitingOperationsAreReturnedOnce) {
  learn({0});
  ASSERT_TRUE(repeated_.offer(hits({0}, 7)));
  EXPECT_EQ(repeated_.release(), hits({0}, 7));
  EXPECT_FALSE(repeated_.waiting());
  EXPECT_FALSE(repeated_.release());
}

TEST_F(RepeatedPlanTest, OnlyAPlanForJustTheSlotsIsKept) {
  const auto kept = [&](const std::function<void(wire::Plan&)>& change, bool nothing_pending) {
    RepeatedPlan repeated;
    repeated.offer(hits({0, 2}));
    wire::Plan plan = plan_for({0, 2});
    change(plan);
    repeated.learn(plan, nothing_pending);
    return repeated.offer(hits({0, 2}));
  };
  EXPECT_TRUE(kept([](wire::Plan&) {}, true));
  EXPECT_FALSE(kept([](wire::Plan&) {}, false));
  EXPECT_FALSE(kept([](wire::Plan& plan) { plan.shutdown = true; }, true));
  EXPECT_FALSE(kept([](wire::Plan& plan) { plan.errors.emplace_back(); }, true));
  EXPECT_FALSE(kept([](wire::Plan& plan) { plan.batches[0].absent = {1}; }, true));
  EXPECT_FALSE(kept([](wire::Plan& plan) { plan.batches[0].tensors.pop_back(); }, true));
  EXPECT_FALSE(kept([](wire::Plan& plan) { plan.batches[0].tensors[0] = wire::Response{}; }, true));
  // Something else has come in between.
  RepeatedPlan repeated;
  repeated.offer(hits({0, 2}));
  repeated.release();
  repeated.learn(plan_for({0, 2}), true);
  EXPECT_FALSE(repeated.offer(hits({0, 2})));
}

TEST_F(RepeatedPlanTest, ItIsForgottenWithTheMeaningOfTheSlots) {
  learn({0});
  repeated_.forget();
  EXPECT_FALSE(repeated_.offer(hits({0})));
}

TEST_F(RepeatedPlanTest, TheCacheChangesAsThePlanChangesIt) {
  learn({0});
  repeated_.mark_cache_touched();  // a later plan has used the other slots
  cache_.touch(1);
  cache_.touch(2);
  ASSERT_TRUE(repeated_.offer(hits({0})));
  repeated_.repeat(4, cache_);
  EXPECT_EQ(oldest(), 1U);
}

}  // namespace
}  // namespace hvd::control
