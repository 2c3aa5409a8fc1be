#include "negotiation/negotiator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "hvd/error.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

class NegotiatorTest : public ::testing::Test {
 protected:
  wire::Plan next_plan(std::vector<wire::Batch> batches,
                       std::vector<wire::ErrorEntry> errors = {}) {
    wire::Plan plan;
    plan.sequence = negotiator_.last_applied() + 1;
    plan.batches = std::move(batches);
    plan.errors = std::move(errors);
    return plan;
  }
  static wire::PlannedTensor in_full(wire::Request request, std::vector<std::int64_t> dims = {}) {
    return wire::Response{std::move(request), std::move(dims)};
  }
  static wire::PlannedTensor in_slot(std::uint32_t slot, std::uint64_t ordinal = 0) {
    return wire::SlotUse{slot, ordinal};
  }
  std::optional<RankReport> next_report() {
    const auto report = negotiator_.next_report();
    if (!report) return std::nullopt;
    EXPECT_EQ(rank_report(*report).rank, 1);
    return rank_report(*report);
  }
  static wire::ErrorEntry stalled(std::string name, std::vector<int> missing,
                                  std::string message = "late") {
    return {0, std::move(name), StatusCode::kStalled, std::move(message), -1, std::move(missing)};
  }
  void run(const wire::Request& request, std::vector<std::int64_t> dims = {}) {
    EXPECT_FALSE(negotiator_.submit(request));
    negotiator_.next_report();
    negotiator_.apply(next_plan({wire::Batch{{in_full(request, std::move(dims))}}}));
  }

  ProcessSetTable sets_{2};
  Negotiator negotiator_{1, sets_, 16};
};

TEST_F(NegotiatorTest, ReportsNewOperationsOnce) {
  EXPECT_FALSE(next_report());
  negotiator_.submit(allreduce("a"));
  negotiator_.submit(allreduce("b"));
  EXPECT_EQ(negotiator_.awaiting(), 2u);
  const auto report = next_report();
  ASSERT_TRUE(report);
  EXPECT_THAT(report->requests, ElementsAre(allreduce("a"), allreduce("b")));
  EXPECT_FALSE(next_report());
  negotiator_.submit(allreduce("c"));
  const auto next = negotiator_.next_report();
  ASSERT_TRUE(next);
  EXPECT_EQ(next->sections.at(0).groups.at(0).requests.at(0).stamp, wire::stamp_of_request(2, 0));
  EXPECT_EQ(negotiator_.reported_in_full(), 3u);
}

TEST_F(NegotiatorTest, AnOperationInFlightCannotBeSubmittedAgain) {
  negotiator_.submit(allreduce("a"));
  EXPECT_EQ(failure([&] { negotiator_.submit(allreduce("a")); }),
            "allreduce 'a' was submitted while it is in flight");
}

TEST_F(NegotiatorTest, ARequestTooLargeForAMessageIsRefusedAtOnce) {
  EXPECT_THROW(negotiator_.submit(allreduce(std::string(wire::kMaxNameBytes + 1, 'x'))),
               UsageError);
  EXPECT_THROW(
      negotiator_.submit(in_group(allreduce("a"), std::string(wire::kMaxNameBytes + 1, 'x'), 2, 0)),
      UsageError);
  EXPECT_THROW(negotiator_.submit(allreduce("a", std::vector<std::int64_t>(wire::kMaxDims + 1, 1))),
               UsageError);
  wire::Request elsewhere = allreduce("a");
  elsewhere.process_set = 3;
  EXPECT_THROW(negotiator_.submit(elsewhere), UsageError);
  EXPECT_EQ(negotiator_.awaiting(), 0u);
  EXPECT_FALSE(next_report());
}

TEST_F(NegotiatorTest, AppliesABatchInItsOrder) {
  negotiator_.submit(allreduce("a"));
  negotiator_.submit(allreduce("b"));
  next_report();
  const Applied applied = negotiator_.apply(
      next_plan({wire::Batch{{in_full(allreduce("b")), in_full(allreduce("a"))}}}));
  ASSERT_THAT(applied.batches, SizeIs(1));
  ASSERT_THAT(applied.batches[0].operations, SizeIs(2));
  EXPECT_EQ(applied.batches[0].operations[0].request, allreduce("b"));
  EXPECT_EQ(negotiator_.awaiting(), 0u);
  EXPECT_EQ(negotiator_.last_applied(), 1u);
}

TEST_F(NegotiatorTest, ASecondUseIsOneBit) {
  run(allreduce("a"));
  run(allreduce("b"));
  negotiator_.submit(allreduce("b"));
  negotiator_.submit(allreduce("a"));
  const auto report = next_report();
  EXPECT_THAT(report->cached, ElementsAre(0, 1));
  EXPECT_THAT(report->requests, IsEmpty());
  EXPECT_EQ(report->last_applied, 2u);
  EXPECT_EQ(negotiator_.reported_by_bit(), 2u);
  const Applied applied = negotiator_.apply(next_plan({wire::Batch{{in_slot(1), in_slot(0)}}}));
  EXPECT_EQ(applied.batches.at(0).operations.at(0).request, allreduce("b"));
}

TEST_F(NegotiatorTest, AChangedTensorGoesInFullAgain) {
  run(allreduce("a"));
  negotiator_.submit(allreduce("a", {5}));
  EXPECT_THAT(next_report()->requests, ElementsAre(allreduce("a", {5})));
}

TEST_F(NegotiatorTest, AnAllgatherIsOneBitWhileThisRanksPartIsEqual) {
  // The plan contains rank 0's request; this is rank 1.
  negotiator_.submit(allgather("g", {7, 2}));
  next_report();
  const Applied applied =
      negotiator_.apply(next_plan({wire::Batch{{in_full(allgather("g", {3, 2}), {3, 7})}}}));
  EXPECT_EQ(applied.batches.at(0).operations.at(0).request, allgather("g", {7, 2}));
  EXPECT_THAT(applied.batches.at(0).operations.at(0).first_dims, ElementsAre(3, 7));
  negotiator_.submit(allgather("g", {7, 2}));
  EXPECT_THAT(next_report()->cached, ElementsAre(0));
  negotiator_.apply(next_plan({wire::Batch{{in_slot(0)}}}));
  negotiator_.submit(allgather("g", {6, 2}));
  EXPECT_THAT(next_report()->requests, SizeIs(1));
}

TEST_F(NegotiatorTest, UnnamedOperationsAreCachedByKindAndCarryTheirOrdinal) {
  run(unnamed(OpKind::kAllreduce, 0));
  negotiator_.submit(unnamed(OpKind::kAllreduce, 1));
  negotiator_.submit(unnamed(OpKind::kAllreduce, 2));
  const auto report = next_report();
  EXPECT_THAT(report->cached_unnamed, ElementsAre(wire::SlotUse{0, 1}, wire::SlotUse{0, 2}));
  EXPECT_THAT(report->cached, IsEmpty());
  const Applied applied =
      negotiator_.apply(next_plan({wire::Batch{{in_slot(0, 1), in_slot(0, 2)}}}));
  EXPECT_EQ(applied.batches.at(0).operations.at(1).request, unnamed(OpKind::kAllreduce, 2));
}

TEST_F(NegotiatorTest, ATombstoneEndsTheNextUseAndOnlyThat) {
  negotiator_.apply(next_plan({}, {stalled("a", {1})}));
  const auto error = negotiator_.submit(allreduce("a"));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, StatusCode::kStalled);
  EXPECT_EQ(error->message, "late");
  EXPECT_EQ(negotiator_.awaiting(), 0u);
  EXPECT_FALSE(next_report());
  EXPECT_FALSE(negotiator_.submit(allreduce("a")));
  EXPECT_TRUE(next_report());
}

TEST_F(NegotiatorTest, ATombstoneIsForOneNameOfOneSet) {
  negotiator_.apply(next_plan({}, {stalled("a", {1})}));
  EXPECT_FALSE(negotiator_.submit(allreduce("b")));
  EXPECT_TRUE(negotiator_.submit(allreduce("a")));
}

TEST_F(NegotiatorTest, SeveralUsesMissedAreSeveralTombstones) {
  negotiator_.apply(next_plan({}, {stalled("a", {1}, "first")}));
  negotiator_.apply(next_plan({}, {stalled("a", {1}, "second")}));
  EXPECT_EQ(negotiator_.submit(allreduce("a"))->message, "first");
  EXPECT_EQ(negotiator_.submit(allreduce("a"))->message, "second");
  EXPECT_FALSE(negotiator_.submit(allreduce("a")));
}

TEST_F(NegotiatorTest, AnErrorEndsOperationsInFlightReportedOrNot) {
  negotiator_.submit(allreduce("reported"), 7);
  next_report();
  negotiator_.submit(allreduce("unsent"), 8);
  negotiator_.submit(allreduce("other"), 9);
  const Applied applied =
      negotiator_.apply(next_plan({}, {stalled("reported", {1}), stalled("unsent", {1})}));
  ASSERT_THAT(applied.errors, SizeIs(2));
  EXPECT_EQ(applied.errors[0].use, 7U);
  EXPECT_EQ(applied.errors[1].use, 8U);
  EXPECT_EQ(negotiator_.awaiting(), 1u);
  EXPECT_THAT(next_report()->requests, ElementsAre(allreduce("other")));
  // The errors ended these uses, so the next submissions succeed.
  EXPECT_FALSE(negotiator_.submit(allreduce("reported")));
  EXPECT_FALSE(negotiator_.submit(allreduce("unsent")));
}

TEST_F(NegotiatorTest, ShutdownIsReportedOnce) {
  negotiator_.request_shutdown();
  EXPECT_TRUE(next_report()->shutdown);
  EXPECT_FALSE(next_report());
  wire::Plan plan = next_plan({});
  plan.shutdown = true;
  EXPECT_TRUE(negotiator_.apply(plan).shutdown);
}

TEST_F(NegotiatorTest, AnIdleRankAcknowledgesPlansNowAndThen) {
  int reports = 0;
  for (int i = 0; i < 1024; ++i) {
    negotiator_.apply(next_plan({}));
    const auto report = next_report();
    if (!report) continue;
    ++reports;
    EXPECT_EQ(report->last_applied, negotiator_.last_applied());
    EXPECT_THAT(report->requests, IsEmpty());
  }
  EXPECT_EQ(reports, 4);
}

TEST_F(NegotiatorTest, RefusesImpossiblePlans) {
  wire::Plan late = next_plan({});
  late.sequence = 2;
  EXPECT_EQ(failure([&] { negotiator_.apply(late); }), "plan 2 arrived; expected 1");
  const auto refused = [&](wire::PlannedTensor tensor) {
    return failure([&] { negotiator_.apply(next_plan({wire::Batch{{std::move(tensor)}}})); });
  };
  EXPECT_THAT(refused(in_slot(3)), HasSubstr("slot 3, which is empty"));
  EXPECT_THAT(refused(in_full(allreduce("a"))),
              HasSubstr("runs allreduce 'a', which this rank has not submitted"));
  wire::Request request = allreduce("a");
  request.process_set = 9;
  EXPECT_THAT(refused(in_full(request)), HasSubstr("process set 9"));
  EXPECT_THAT(refused(in_full(allgather("g", {1}), {1})),
              HasSubstr("gives 1 sizes for allgather 'g', expected 2"));
  EXPECT_THAT(refused(in_full(allgather("g", {}), {1, 1})), HasSubstr("scalar"));
  constexpr std::int64_t kHuge = std::int64_t{1} << 61;
  EXPECT_THAT(refused(in_full(allgather("g", {1}), {kHuge, kHuge})),
              HasSubstr("more than 2^63 bytes"));
  request = allreduce("a");
  request.kind = OpKind::kBroadcast;
  request.root = 5;
  EXPECT_THAT(refused(in_full(request)), HasSubstr("root rank 5"));
  EXPECT_THAT(failure([&] { negotiator_.apply(next_plan({}, {stalled("x", {0})})); }),
              HasSubstr("which this rank has not submitted"));
}

TEST_F(NegotiatorTest, RefusesToRunUnreportedOperations) {
  negotiator_.submit(allreduce("a"));
  EXPECT_THAT(
      failure([&] { negotiator_.apply(next_plan({wire::Batch{{in_full(allreduce("a"))}}})); }),
      HasSubstr("has not submitted"));
}

TEST_F(NegotiatorTest, RefusesABatchOfUnlikeTensors) {
  wire::Request other = allreduce("b");
  other.dtype = DataType::kInt64;
  negotiator_.submit(allreduce("a"));
  negotiator_.submit(other);
  next_report();
  EXPECT_THAT(
      failure([&] {
        negotiator_.apply(next_plan({wire::Batch{{in_full(allreduce("a")), in_full(other)}}}));
      }),
      HasSubstr("joins allreduce 'a' and allreduce 'b' in one batch"));
}

// The schedule begins as if the join had never been submitted, so no plan may count this rank as
// joined until it has submitted the join again.
TEST_F(NegotiatorTest, AScheduleEndsAJoinThatIsOnItsWay) {
  run(allreduce("a"));
  wire::Request join;
  join.name = "join";
  join.kind = OpKind::kJoin;
  EXPECT_FALSE(negotiator_.submit(join));
  ASSERT_TRUE(next_report());
  wire::Plan schedule = next_plan({});
  schedule.replay = {{{0}}};
  ASSERT_THAT(negotiator_.apply(schedule).replay, SizeIs(1));
  wire::Batch without_this_rank{{in_slot(0)}, {1}};
  EXPECT_THAT(failure([&] { negotiator_.apply(next_plan({without_this_rank})); }),
              HasSubstr("counts rank 1 as absent from allreduce 'a', but it is not"));
}

}  // namespace
}  // namespace hvd::control
