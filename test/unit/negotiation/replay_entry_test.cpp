// How negotiators and a coordinator come to replay a schedule. ScheduleReplay itself:
// schedule_replay_test.cpp.
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

/// Steps of "a" and an allgather "b", until the next would be replayed.
void learn(Cluster& cluster) {
  for (int step = 0; step < 2; ++step) {
    for (int rank = 0; rank < cluster.size(); ++rank) {
      cluster.submit(rank, allreduce("a"));
      cluster.submit(rank, allgather("b", {rank + 1, 2}));
    }
    for (const Applied& applied : cluster.exchange()) EXPECT_TRUE(applied.replay.empty());
  }
}

void submit_step(Cluster& cluster, int rank) {
  cluster.submit(rank, allreduce("a"));
  cluster.submit(rank, allgather("b", {rank + 1, 2}));
}

TEST(ReplayEntry, ThePlanThatLocksTellsEachRankItsOwnSideOfTheSchedule) {
  Cluster cluster(2, replaying_options());
  learn(cluster);
  for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
  const auto applied = cluster.exchange();
  for (int rank = 0; rank < 2; ++rank) {
    const auto& schedule = applied[static_cast<std::size_t>(rank)].replay;
    EXPECT_EQ(names_of(schedule), (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(schedule.back().back().operations.front().request.shape[0], rank + 1);
    EXPECT_EQ(schedule.back().back().operations.front().first_dims,
              (std::vector<std::int64_t>{1, 2}));
  }
}

TEST(ReplayEntry, AStepWithAGroupOfSeveralSortsIsReplayed) {
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

TEST(ReplayEntry, WhatWasAskedForEarlyCountsForTheLockOnly) {
  Cluster cluster(2, replaying_options());
  learn(cluster);
  for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
  cluster.report_all();
  // The first rank cannot have got its results yet; but another name of the schedule may be reused
  // early.
  ASSERT_TRUE(cluster.decide().has_value());
  cluster.apply(0);
  const Applied second = cluster.apply(1);
  ASSERT_FALSE(second.replay.empty());
  EXPECT_EQ(cluster.rank(1).awaiting(), 0U);
  EXPECT_FALSE(cluster.rank(1).next_report().has_value());
}

TEST(ReplayEntry, AReportFromBeforeTheLockIsIgnored) {
  Cluster cluster(2, replaying_options());
  learn(cluster);
  for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
  cluster.report_all();
  cluster.submit(1, allreduce("extra"));
  const wire::Bytes late = cluster.send(1);
  ASSERT_FALSE(cluster.decide()->replay.empty());
  cluster.arrive(late);
  EXPECT_FALSE(cluster.coordinator().waiting());
  cluster.apply_everywhere();
  // After the replay the rank asks again, and that counts.
  cluster.coordinator().end_replay(0);
  cluster.submit_everywhere(allreduce("extra"));
  const auto applied = cluster.exchange();
  for (const Applied& one : applied)
    EXPECT_EQ(names_of(one.batches), std::vector<std::string>{"extra"});
}

TEST(ReplayEntry, ALeaveFromBeforeTheLockIsIgnored) {
  Cluster cluster(2, replaying_options());
  learn(cluster);
  for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
  cluster.report_all();
  const auto plan = cluster.decide();
  ASSERT_FALSE(plan->replay.empty());
  const auto leaves = [](std::uint64_t applied) {
    wire::Report late;
    late.applied = {{applied, RankSet(1)}};
    late.leaving = RankSet(1);
    return late;
  };
  cluster.coordinator().accept(leaves(plan->sequence - 1), {});
  cluster.apply_everywhere();
  cluster.coordinator().end_replay(0);
  cluster.submit(0, allreduce("extra"));
  cluster.report_all();
  EXPECT_FALSE(cluster.decide()) << "rank 1 may still come";
  cluster.submit(1, allreduce("extra"));
  for (const Applied& one : cluster.exchange())
    EXPECT_EQ(names_of(one.batches), std::vector<std::string>{"extra"});
  EXPECT_EQ(leaving_since(leaves(plan->sequence - 1), plan->sequence), RankSet());
  EXPECT_EQ(leaving_since(leaves(plan->sequence), plan->sequence), RankSet(1));
}

// Nor by a rank on its way, to which the next flag of that rank would make it look new.
TEST(ReplayEntry, ALeaveFromBeforeTheLockIsNotPassedOn) {
  Cluster cluster(2, replaying_options());
  learn(cluster);
  for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
  cluster.report_all();
  const auto plan = cluster.decide();
  ASSERT_FALSE(plan->replay.empty());
  cluster.apply_everywhere();
  Aggregator inner(RankSet(1), cluster.rank(1), std::chrono::seconds(1));
  inner.apply(*plan);
  wire::Report late;
  late.applied = {{plan->sequence - 1, RankSet(1)}};
  late.leaving = RankSet(1);
  inner.accept(late, {});
  const auto passed_on = inner.next_report({});
  ASSERT_TRUE(passed_on);
  EXPECT_EQ(passed_on->leaving, RankSet());
}

TEST(ReplayEntry, WhatWaitsAndIsNotOfTheSchedulePreventsTheLock) {
  Cluster cluster(2, replaying_options());
  learn(cluster);
  cluster.submit(0, allreduce("extra"));
  for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
  for (const Applied& applied : cluster.exchange()) EXPECT_TRUE(applied.replay.empty());
}

TEST(ReplayEntry, ARankThatLeavesOrHasJoinedPreventsTheLock) {
  for (const bool leaves : {true, false}) {
    Cluster cluster(2, replaying_options());
    learn(cluster);
    for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
    if (leaves) {
      cluster.rank(1).request_shutdown();
    } else {
      wire::Request join = unnamed(OpKind::kJoin, 0, {0});
      join.dtype = DataType::kUInt8;
      cluster.submit(1, join);
    }
    for (const Applied& applied : cluster.exchange()) EXPECT_TRUE(applied.replay.empty()) << leaves;
  }
}

TEST(ReplayEntry, NothingIsLockedUnlessAskedFor) {
  Cluster cluster(2);
  for (int step = 0; step < 6; ++step) {
    for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
    for (const Applied& applied : cluster.exchange()) EXPECT_TRUE(applied.replay.empty());
  }
}

TEST(ReplayEntry, OperationsThatTheCacheDoesNotHoldAreNotLocked) {
  CoordinatorOptions options = replaying_options();
  options.cache_capacity = 1;
  Cluster cluster(2, options);
  for (int step = 0; step < 6; ++step) {
    for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
    for (const Applied& applied : cluster.exchange()) EXPECT_TRUE(applied.replay.empty());
  }
}

TEST(ReplayEntry, ALeaveThatWasReportedBeforeTheLockIsReportedAgain) {
  Cluster cluster(2, replaying_options());
  learn(cluster);
  for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
  cluster.report_all();
  cluster.rank(1).request_shutdown();
  const wire::Bytes late = cluster.send(1);
  ASSERT_FALSE(cluster.decide()->replay.empty());
  cluster.arrive(late);
  cluster.apply_everywhere();
  const auto again = cluster.rank(1).next_report();
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->leaving, RankSet(1));
}

TEST(ReplayEntry, ANegotiatorRefusesALockThatCannotBe) {
  const std::vector<std::vector<wire::SlotBundle>> schedules = {
      {{{7}}}, {{{0}}, {{0}}}, {{{0}, {0}}}, {{{}}}, {{}}, {{{0, 1}}}};
  for (const std::vector<wire::SlotBundle>& schedule : schedules) {
    Cluster cluster(2);
    for (int rank = 0; rank < 2; ++rank) submit_step(cluster, rank);
    cluster.exchange();
    wire::Plan plan;
    plan.sequence = 2;
    plan.replay = schedule;
    EXPECT_THROW(cluster.rank(0).apply(plan), Error);
  }
}

}  // namespace
}  // namespace hvd::control
