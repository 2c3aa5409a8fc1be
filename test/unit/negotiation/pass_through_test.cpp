#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "negotiation/aggregator.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

/// Plan 1 has put "a" into slot 0 and "b" into slot 1.
class PassThroughTest : public ::testing::Test {
 protected:
  PassThroughTest() {
    put(allreduce("a"), 1);
    put(allreduce("b"), 1);
  }

  void put(wire::Request request, std::uint64_t plan) {
    cache_.put({std::move(request), {}}, plan);
    state_.follow_displaced(plan);
  }
  void remember(const std::vector<std::uint32_t>& slots, std::vector<std::string> keys = {},
                std::uint64_t as_of = 1) {
    state_.start();
    state_.remember({wire::SlotSet(slots), std::move(keys)}, as_of, last_plan_);
  }
  /// Applies the next plan, in which these operations end.
  bool stays_open_after(std::vector<wire::PlannedTensor> tensors,
                        std::vector<wire::ErrorEntry> errors = {}) {
    wire::Plan plan{.sequence = ++last_plan_};
    plan.batches = {{std::move(tensors), {}}};
    plan.errors = std::move(errors);
    state_.apply(plan);
    return stays_open();
  }
  bool stays_open_after_error(int process_set, const std::string& name) {
    return stays_open_after({}, {{.process_set = process_set, .name = name}});
  }
  bool stays_open() {
    state_.stop_if_done();
    return state_.active();
  }
  static wire::PlannedTensor in_slot(std::uint32_t slot, std::uint64_t ordinal = 0) {
    return wire::SlotUse{slot, ordinal};
  }
  static wire::PlannedTensor in_full(wire::Request request) { return wire::Response{request}; }

  ResponseCache cache_{2};
  PassThrough state_{cache_};
  std::uint64_t last_plan_ = 1;
};

TEST_F(PassThroughTest, LastsUntilPlansHaveEndedAllThatWasForwardedInParts) {
  state_.start();
  EXPECT_TRUE(state_.active());
  EXPECT_FALSE(stays_open()) << "no operation keeps it open";
  remember({0, 1}, {tensor_key(0, "new"), tensor_key(7, "new"), tensor_key(0, "failed")});
  EXPECT_TRUE(stays_open());
  EXPECT_TRUE(stays_open_after({in_slot(0), in_full(allreduce("other"))}));
  EXPECT_TRUE(stays_open_after({in_full(allreduce("new"))})) << "only 'new' of set 0 has ended";
  EXPECT_TRUE(stays_open_after_error(7, "b")) << "slot 1 holds 'b' of set 0";
  EXPECT_TRUE(stays_open_after({in_slot(1)}));
  EXPECT_TRUE(stays_open_after_error(0, "failed"));
  EXPECT_FALSE(stays_open_after_error(7, "new"));
  remember({1});
  EXPECT_FALSE(stays_open_after_error(0, "b"));
}

TEST_F(PassThroughTest, ASlotThatHoldsAnotherOperationIsRememberedByName) {
  remember({0, 1});
  ++last_plan_;
  put(allreduce("c"), 2);  // into the slot of a
  EXPECT_TRUE(stays_open_after({in_slot(1)}));
  EXPECT_TRUE(stays_open_after({in_slot(0)})) << "slot 0 holds 'c' now";
  EXPECT_FALSE(stays_open_after({in_full(allreduce("a"))}));
  remember({0}, {}, 1);
  EXPECT_TRUE(stays_open_after({in_slot(0)})) << "slot 0 holds 'c' now";
  EXPECT_FALSE(stays_open_after_error(0, "a"));
}

TEST_F(PassThroughTest, UnnamedOperationsEndByTheirOrdinal) {
  ++last_plan_;
  put(unnamed(OpKind::kAllreduce, 0), 2);  // into the slot of a
  remember({}, {tensor_key(0, wire::unnamed_name(OpKind::kAllreduce, 4))});
  EXPECT_TRUE(stays_open_after({in_slot(0, 3)}));
  EXPECT_FALSE(stays_open_after({in_slot(0, 4)}));
}

TEST_F(PassThroughTest, AJoinKeepsItOpenUntilAPlanHasEndedIt) {
  wire::Request join;
  join.name = "join";
  join.kind = OpKind::kJoin;
  state_.start_join(join.name);
  EXPECT_TRUE(stays_open_after({in_slot(0)}));
  EXPECT_FALSE(stays_open_after({in_full(join)}));
  state_.start_join(join.name);
  EXPECT_TRUE(stays_open_after_error(0, "a"));
  EXPECT_FALSE(stays_open_after_error(0, join.name));
  EXPECT_FALSE(state_.joining());
}

TEST_F(PassThroughTest, AReplayEndsEverything) {
  state_.start_leave();
  EXPECT_TRUE(stays_open_after({in_slot(0)}));
  remember({0}, {tensor_key(0, "new")});
  state_.start_join("join");
  state_.reset();
  EXPECT_FALSE(state_.active());
  EXPECT_FALSE(state_.joining());
  state_.start();
  EXPECT_FALSE(stays_open());
}

TEST_F(PassThroughTest, AnOperationThatNoPlanNamesIsForgottenAfter64Plans) {
  remember({0}, {tensor_key(0, "new")});
  for (int i = 1; i < 64; ++i) EXPECT_TRUE(stays_open_after({in_full(allreduce("other"))}));
  remember({1});  // restarts the count
  EXPECT_TRUE(stays_open_after({in_full(allreduce("other"))}));
  for (int i = 2; i < 64; ++i) stays_open_after({in_full(allreduce("other"))});
  EXPECT_TRUE(stays_open());
  EXPECT_FALSE(stays_open_after({in_full(allreduce("other"))}));
}

TEST_F(PassThroughTest, OperationsOfARemovedSetAreForgotten) {
  ProcessSetTable sets(4);
  const int removed = sets.add({0, 1});
  const int kept = sets.add({1, 2});
  remember({}, {tensor_key(removed, "new"), tensor_key(kept, "new")});
  sets.remove(removed);
  state_.drop_removed(sets);
  EXPECT_TRUE(stays_open());
  EXPECT_FALSE(stays_open_after_error(kept, "new"));
}

}  // namespace
}  // namespace hvd::control
