// How negotiators and a coordinator start to replay a schedule. schedule_replay_test.cpp tests
// ScheduleReplay itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hvd/error.h"
#include "negotiation/aggregator.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using ::testing::HasSubstr;

CoordinatorOptions replaying_options() {
  CoordinatorOptions options;
  options.schedule_lock = true;
  return options;
}

std::vector<std::string> names_of(const std::vector<AgreedBatch>& schedule) {
  std::vector<std::string> names;
  for (const AgreedBatch& batch : schedule) {
    for (const wire::Response& operation : batch.operations)
      names.push_back(operation.request.name);
  }
  return names;
}

std::vector<std::string> names_of(const std::vector<AgreedBundle>& schedule) {
  std::vector<std::string> names;
  for (const AgreedBundle& bundle : schedule) {
    for (std::string& name : names_of(bundle)) names.push_back(std::move(name));
  }
  return names;
}

void submit_step(Cluster& cluster) {
  for (int rank = 0; rank < cluster.size(); ++rank) {
    cluster.submit(rank, allreduce("a"));
    cluster.submit(rank, allgather("b", {rank + 1, 2}));
  }
}

/// Two ranks have run two steps of "a" and an allgather "b", so that the next would be replayed.
class ReplayEntryTest : public ::testing::Test {
 protected:
  ReplayEntryTest() {
    for (int step = 0; step < 2; ++step) expect_no_replay(cluster_);
  }
  /// Runs a step, after which no replay begins.
  static void expect_no_replay(Cluster& cluster) {
    submit_step(cluster);
    for (const Applied& applied : cluster.exchange()) EXPECT_TRUE(applied.replay.empty());
  }
  void report_step() {
    submit_step(cluster_);
    cluster_.report_all();
  }
  /// Decides the plan that begins the replay.
  wire::Plan decide_replay() {
    const auto plan = cluster_.decide();
    EXPECT_TRUE(plan && !plan->replay.empty());
    return plan.value_or(wire::Plan());
  }
  void expect_extra_runs() {
    for (const Applied& one : cluster_.exchange())
      EXPECT_EQ(names_of(one.batches), std::vector<std::string>{"extra"});
  }
  static wire::Report leave_after(std::uint64_t plan) {
    wire::Report report;
    report.applied = {{plan, RankSet(1)}};
    report.leaving = RankSet(1);
    return report;
  }

  Cluster cluster_{2, replaying_options()};
};

TEST_F(ReplayEntryTest, ThePlanThatLocksGivesEachRankItsOwnSideOfTheSchedule) {
  submit_step(cluster_);
  const auto applied = cluster_.exchange();
  for (int rank = 0; rank < 2; ++rank) {
    const auto& schedule = applied[static_cast<std::size_t>(rank)].replay;
    EXPECT_EQ(names_of(schedule), (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(schedule.back().back().operations.front().request.shape[0], rank + 1);
    EXPECT_EQ(schedule.back().back().operations.front().first_dims,
              (std::vector<std::int64_t>{1, 2}));
  }
}

TEST_F(ReplayEntryTest, AStepWithAGroupOfSeveralSortsIsReplayed) {
  Cluster cluster(2, replaying_options());
  wire::Request half = in_group(allreduce("half"), "g", 2, 1), adasum = allreduce("adasum");
  half.dtype = DataType::kFloat16;
  adasum.op = ReduceOp::kAdasum;
  const std::vector<wire::Request> step = {in_group(allreduce("single"), "g", 2, 0), half, adasum,
                                           allreduce("a")};
  std::vector<Applied> applied;
  for (int turn = 0; turn < 3; ++turn) {
    for (const wire::Request& request : step) cluster.submit_everywhere(request);
    applied = cluster.exchange();
  }
  for (const Applied& one : applied) {
    ASSERT_EQ(one.replay.size(), 2U);
    EXPECT_EQ(names_of(one.replay[0]), (std::vector<std::string>{"single", "a", "half"}));
    EXPECT_EQ(names_of(one.replay[1]), std::vector<std::string>{"adasum"});
  }
}

TEST_F(ReplayEntryTest, EarlyRequestsCountForTheLockOnly) {
  report_step();
  // The first rank cannot have got its results yet; but another name of the schedule may be reused
  // early.
  decide_replay();
  cluster_.apply(0);
  const Applied second = cluster_.apply(1);
  ASSERT_FALSE(second.replay.empty());
  EXPECT_EQ(cluster_.rank(1).awaiting(), 0U);
  EXPECT_FALSE(cluster_.rank(1).next_report().has_value());
}

TEST_F(ReplayEntryTest, AReportFromBeforeTheLockIsIgnored) {
  report_step();
  cluster_.submit(1, allreduce("extra"));
  const wire::Bytes late = cluster_.send(1);
  decide_replay();
  cluster_.arrive(late);
  EXPECT_FALSE(cluster_.coordinator().waiting());
  cluster_.apply_everywhere();
  // After the replay the rank submits the operation again, which then counts.
  cluster_.coordinator().end_replay(0, 0);
  cluster_.submit_everywhere(allreduce("extra"));
  expect_extra_runs();
}

TEST_F(ReplayEntryTest, ALeaveFromBeforeTheLockIsIgnored) {
  report_step();
  const wire::Plan plan = decide_replay();
  cluster_.coordinator().accept(leave_after(plan.sequence - 1), {});
  cluster_.apply_everywhere();
  cluster_.coordinator().end_replay(0, 0);
  cluster_.submit(0, allreduce("extra"));
  cluster_.report_all();
  EXPECT_FALSE(cluster_.decide()) << "rank 1 may still come";
  cluster_.submit(1, allreduce("extra"));
  expect_extra_runs();
  EXPECT_EQ(leaving_since(leave_after(plan.sequence - 1), plan.sequence), RankSet());
  EXPECT_EQ(leaving_since(leave_after(plan.sequence), plan.sequence), RankSet(1));
}

// An inner rank of the tree does not forward such a leave, which the coordinator could mistake for
// a new one.
TEST_F(ReplayEntryTest, ALeaveFromBeforeTheLockIsNotPassedOn) {
  report_step();
  const wire::Plan plan = decide_replay();
  cluster_.apply_everywhere();
  Aggregator inner(RankSet(1), cluster_.rank(1), std::chrono::seconds(1));
  inner.apply(plan);
  inner.accept(leave_after(plan.sequence - 1), {});
  const auto passed_on = inner.next_report({});
  ASSERT_TRUE(passed_on);
  EXPECT_EQ(passed_on->leaving, RankSet());
}

TEST_F(ReplayEntryTest, AForeignWaitingOperationPreventsTheLock) {
  cluster_.submit(0, allreduce("extra"));
  submit_step(cluster_);
  for (const Applied& applied : cluster_.exchange()) EXPECT_TRUE(applied.replay.empty());
}

TEST_F(ReplayEntryTest, ARankThatLeavesPreventsTheLock) {
  cluster_.rank(1).request_shutdown();
  expect_no_replay(cluster_);
}

TEST_F(ReplayEntryTest, ARankThatHasJoinedPreventsTheLock) {
  submit_step(cluster_);
  wire::Request join = unnamed(OpKind::kJoin, 0, {0});
  join.dtype = DataType::kUInt8;
  cluster_.submit(1, join);
  for (const Applied& applied : cluster_.exchange()) EXPECT_TRUE(applied.replay.empty());
}

TEST_F(ReplayEntryTest, OnlyOperationsInTheCacheAreLockedAndOnlyWhereThatIsSwitchedOn) {
  CoordinatorOptions with_a_small_cache = replaying_options();
  with_a_small_cache.cache_capacity = 1;
  for (const CoordinatorOptions& options : {CoordinatorOptions(), with_a_small_cache}) {
    Cluster cluster(2, options);
    for (int step = 0; step < 6; ++step) expect_no_replay(cluster);
  }
}

TEST_F(ReplayEntryTest, ALeaveThatWasReportedBeforeTheLockIsReportedAgain) {
  report_step();
  cluster_.rank(1).request_shutdown();
  const wire::Bytes late = cluster_.send(1);
  decide_replay();
  cluster_.arrive(late);
  cluster_.apply_everywhere();
  const auto again = cluster_.rank(1).next_report();
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->leaving, RankSet(1));
}

TEST_F(ReplayEntryTest, ANegotiatorRefusesALockThatCannotBe) {
  const std::vector<std::vector<wire::SlotBundle>> schedules = {
      {{{7}}}, {{{0}}, {{0}}}, {{{0}, {0}}}, {{{}}}, {{}}, {{{0, 1}}}};
  for (const std::vector<wire::SlotBundle>& schedule : schedules) {
    Cluster cluster(2);
    submit_step(cluster);
    cluster.exchange();
    wire::Plan plan;
    plan.sequence = 2;
    plan.replay = schedule;
    EXPECT_THROW(cluster.rank(0).apply(plan), Error);
  }
}

}  // namespace
}  // namespace hvd::control
