#include "negotiation/open_state.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

/// Slot 0 holds "a", slot 1 "b", as plan 1 has brought them.
class OpenStateTest : public ::testing::Test {
 protected:
  OpenStateTest() {
    cache_.put({allreduce("a"), {}});
    cache_.put({allreduce("b"), {}});
    follow(1);
  }

  void follow(std::uint64_t sequence) {
    meanings_.update(cache_, sequence, [this](std::uint32_t slot, const SlotMeaning& former) {
      state_.note_displaced(slot, former);
    });
  }
  void remember(const std::vector<std::uint32_t>& slots, std::vector<std::string> keys = {},
                std::uint64_t as_of = 1) {
    state_.set_open();
    state_.remember({wire::SlotSet(slots), std::move(keys)}, as_of, last_plan_);
  }
  /// The next plan ends this.
  void plan(wire::PlannedTensor tensor) {
    wire::Plan plan{.sequence = ++last_plan_};
    plan.batches.push_back({{std::move(tensor)}});
    state_.note_plan(plan);
  }
  void plan_slot(std::uint32_t slot, std::uint64_t ordinal = 0) {
    wire::PlannedTensor tensor;
    tensor.slot = slot;
    tensor.ordinal = ordinal;
    plan(std::move(tensor));
  }
  void plan_request(wire::Request request) {
    wire::PlannedTensor tensor;
    tensor.request = std::move(request);
    plan(std::move(tensor));
  }
  void plan_error(int process_set, std::string name) {
    wire::Plan plan{.sequence = ++last_plan_};
    plan.errors.push_back({.process_set = process_set, .name = std::move(name)});
    state_.note_plan(plan);
  }
  bool stays_open() {
    state_.close_if_done();
    return state_.open();
  }

  ResponseCache cache_{2};
  SlotMeanings meanings_;
  OpenState state_{meanings_};
  std::uint64_t last_plan_ = 1;
};

TEST_F(OpenStateTest, ClosesWhenNothingKeepsItOpen) {
  EXPECT_FALSE(state_.open());
  state_.set_open();
  EXPECT_TRUE(state_.open());
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, StaysOpenUntilPlansHaveEndedAllThatWentOnInParts) {
  remember({0, 1}, {tensor_key(0, "new")});
  EXPECT_TRUE(stays_open());
  plan_slot(0);
  plan_request(allreduce("other"));
  EXPECT_TRUE(stays_open());
  plan_request(allreduce("new"));
  EXPECT_TRUE(stays_open());
  plan_slot(1);
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, AnErrorEndsAnOperationToo) {
  remember({1}, {tensor_key(0, "new"), tensor_key(7, "new")});
  plan_error(0, "b");
  plan_error(0, "new");
  EXPECT_TRUE(stays_open()) << "that of set 7 has not ended";
  plan_error(7, "new");
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, AnErrorOfAnotherSetEndsNoSlot) {
  remember({0});
  plan_error(7, "a");
  EXPECT_TRUE(stays_open());
  plan_error(0, "a");
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, WhatIsDisplacedAndDidNotGoOnInPartsDoesNotMatter) {
  remember({1});
  cache_.put({allreduce("c"), {}});  // in the slot of a
  follow(2);
  plan_slot(1);
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, ASlotIsRememberedByNameOnceItHoldsSomethingElse) {
  remember({0});
  cache_.put({allreduce("c"), {}});  // in the slot of a
  follow(2);
  plan_slot(0);
  EXPECT_TRUE(stays_open()) << "that was c";
  plan_request(allreduce("a"));
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, ASlotOfAnEarlierPlanIsRememberedByItsName) {
  cache_.put({allreduce("c"), {}});
  follow(2);
  remember({0}, {}, 1);
  plan_slot(0);
  EXPECT_TRUE(stays_open()) << "that was c";
  plan_error(0, "a");
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, UnnamedOperationsEndByTheirOrdinal) {
  cache_.put({unnamed(OpKind::kAllreduce, 0), {}});  // in the slot of a
  follow(2);
  remember({}, {tensor_key(0, wire::unnamed_name(OpKind::kAllreduce, 4))});
  plan_slot(0, 3);
  EXPECT_TRUE(stays_open());
  plan_slot(0, 4);
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, AJoinKeepsItOpenUntilAPlanHasEndedIt) {
  wire::Request join;
  join.name = "join";
  join.kind = OpKind::kJoin;
  state_.note_joining(join.name);
  EXPECT_TRUE(state_.joining());
  plan_slot(0);
  EXPECT_TRUE(stays_open());
  plan_request(join);
  EXPECT_FALSE(state_.joining());
  EXPECT_FALSE(stays_open());

  state_.note_joining(join.name);
  plan_error(0, "a");
  EXPECT_TRUE(stays_open());
  plan_error(0, join.name);
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, ARankThatLeavesKeepsItOpenUntilAReplay) {
  state_.note_leaving();
  plan_slot(0);
  EXPECT_TRUE(stays_open());
  state_.reset();
  EXPECT_FALSE(state_.open());
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, AReplayEndsEverything) {
  remember({0}, {tensor_key(0, "new")});
  state_.note_joining("join");
  state_.reset();
  EXPECT_FALSE(state_.open());
  EXPECT_FALSE(state_.joining());
  state_.set_open();
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, WhatNoPlanNamesIsForgottenAfterAWhile) {
  remember({0}, {tensor_key(0, "new")});
  for (int i = 1; i < 64; ++i) plan_request(allreduce("other"));
  EXPECT_TRUE(stays_open());
  plan_request(allreduce("other"));
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, TheWhileBeginsAnewWithWhatIsRemembered) {
  remember({0});
  for (int i = 1; i < 64; ++i) plan_request(allreduce("other"));
  remember({1});
  plan_request(allreduce("other"));
  EXPECT_TRUE(stays_open());
  plan_slot(0);
  plan_slot(1);
  EXPECT_FALSE(stays_open());
}

TEST_F(OpenStateTest, WhatIsOfARemovedSetIsForgotten) {
  ProcessSetTable sets(4);
  const int removed = sets.add({0, 1});
  const int kept = sets.add({1, 2});
  remember({}, {tensor_key(removed, "new"), tensor_key(kept, "new")});
  sets.remove(removed);
  state_.drop_removed(sets);
  EXPECT_TRUE(stays_open());
  plan_error(kept, "new");
  EXPECT_FALSE(stays_open());
}

}  // namespace
}  // namespace hvd::control
