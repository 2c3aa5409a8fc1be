// How the members of a process set start to replay a schedule of their own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hvd/error.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

CoordinatorOptions replaying_sets() {
  CoordinatorOptions options;
  options.schedule_lock = options.replays_sets = true;
  return options;
}

wire::Request making(std::vector<int> ranks) {
  wire::Request request = allreduce(name_by_members("", ranks), {0});
  request.kind = OpKind::kAddProcessSet;
  request.process_set = wire::kOwnMembers;
  request.new_set = std::move(ranks);
  return request;
}

wire::Request request_of_set(wire::Request request, int process_set) {
  request.process_set = process_set;
  return request;
}

/// Set 1 has ranks 0 and 1, set 2 ranks 1 and 2.
class SetReplayEntry : public ::testing::Test {
 protected:
  SetReplayEntry() {
    for (const std::vector<int>& ranks : {std::vector<int>{0, 1}, {1, 2}}) {
      for (const int rank : ranks) cluster_.submit(rank, making(ranks));
      cluster_.exchange();
    }
  }
  void submit(const std::string& name, int process_set) {
    for (const int rank : members(process_set))
      cluster_.submit(rank, request_of_set(allreduce(name), process_set));
  }
  static std::vector<int> members(int process_set) {
    return process_set == 1 ? std::vector<int>{0, 1} : std::vector<int>{1, 2};
  }
  std::vector<Applied> step(int process_set) {
    submit("a", process_set);
    return cluster_.exchange();
  }
  /// The members have run two steps of "a", so that the next begins a replay.
  void warm_up(int process_set) {
    for (int i = 0; i < 2; ++i) {
      for (const Applied& applied : step(process_set)) EXPECT_THAT(applied.replay, IsEmpty());
    }
  }
  wire::Plan decide_replay(int process_set) {
    submit("a", process_set);
    cluster_.report_all();
    const auto plan = cluster_.decide();
    EXPECT_TRUE(plan && !plan->replay.empty());
    return plan.value_or(wire::Plan());
  }
  std::vector<bool> enters(const std::vector<Applied>& applied, int process_set) {
    std::vector<bool> entered;
    for (const Applied& one : applied)
      entered.push_back(!one.replay.empty() && one.replayed_set == process_set);
    return entered;
  }

  Cluster cluster_{3, replaying_sets()};
};

TEST_F(SetReplayEntry, OnlyTheMembersEnter) {
  warm_up(2);
  const std::vector<Applied> applied = step(2);
  EXPECT_THAT(enters(applied, 2), ElementsAre(false, true, true));
  EXPECT_THAT(*applied[1].replay.front().front().members, ElementsAre(1, 2));
}

TEST_F(SetReplayEntry, SetsLearnBesideEachOther) {
  for (int i = 0; i < 2; ++i) {
    step(1);
    submit("a", 2);
    submit("b", 1);  // in one plan with another set
    cluster_.exchange();
  }
  EXPECT_THAT(enters(step(2), 2), ElementsAre(false, true, true));
  step(1);
  submit("b", 1);
  EXPECT_THAT(enters(cluster_.exchange(), 1), ElementsAre(true, true, false));
}

TEST_F(SetReplayEntry, OnePlanBeginsOneReplay) {
  for (int i = 0; i < 2; ++i) {
    submit("a", 1);
    step(2);
  }
  submit("a", 1);
  EXPECT_THAT(enters(step(2), 1), ElementsAre(true, true, false));
  EXPECT_THAT(enters(step(2), 2), ElementsAre(false, true, true));
}

TEST_F(SetReplayEntry, OperationsOfOtherSetsStayPending) {
  warm_up(2);
  cluster_.submit(1, request_of_set(allreduce("early"), 1));
  cluster_.submit(1, allreduce("of all"));
  EXPECT_THAT(enters(step(2), 2), ElementsAre(false, true, true));
  EXPECT_EQ(cluster_.rank(1).awaiting(), 2U);
  cluster_.submit(0, request_of_set(allreduce("early"), 1));
  EXPECT_THAT(cluster_.exchange()[1].batches, SizeIs(1));
  for (const int rank : {0, 2}) cluster_.submit(rank, allreduce("of all"));
  EXPECT_THAT(cluster_.exchange()[1].batches, SizeIs(1));
}

TEST_F(SetReplayEntry, AReportFromBeforeIsIgnoredForThisSetOnly) {
  warm_up(2);
  decide_replay(2);
  cluster_.submit(1, request_of_set(allreduce("late"), 2));
  cluster_.submit(1, request_of_set(allreduce("late"), 1));
  cluster_.submit(1, making({1, 2}));
  const wire::Bytes crossing = cluster_.send(1);
  cluster_.arrive(crossing);
  cluster_.apply_everywhere();
  EXPECT_EQ(cluster_.rank(1).awaiting(), 1U) << "it withdraws what it submits again later";
  // Nothing that it has withdrawn counts.
  cluster_.submit(2, request_of_set(allreduce("late"), 2));
  cluster_.submit(2, making({1, 2}));
  cluster_.submit(0, request_of_set(allreduce("late"), 1));
  const std::vector<Applied> applied = cluster_.exchange();
  EXPECT_THAT(applied[1].batches, SizeIs(1));
  EXPECT_THAT(applied[2].batches, IsEmpty());
  cluster_.submit(1, request_of_set(allreduce("late"), 2));
  cluster_.submit(1, making({1, 2}));
  EXPECT_THAT(cluster_.exchange()[2].batches, SizeIs(2));
}

TEST_F(SetReplayEntry, ALeaveFromBeforeIsIgnoredIfItIsOfAMember) {
  warm_up(2);
  const wire::Plan plan = decide_replay(2);
  const auto leave = [&](int rank, std::uint64_t applied) {
    wire::Report report;
    report.applied = {{applied, RankSet(rank)}};
    report.leaving = RankSet(rank);
    cluster_.coordinator().accept(report, {});
  };
  leave(1, plan.sequence - 1);
  leave(2, plan.sequence - 1);
  cluster_.apply_everywhere();
  cluster_.submit(0, request_of_set(allreduce("w"), 1));
  cluster_.report_all();
  EXPECT_FALSE(cluster_.decide()) << "rank 1 may still submit it";
  cluster_.rank(1).request_shutdown();
  const auto again = cluster_.rank(1).next_report();
  ASSERT_TRUE(again);
  EXPECT_EQ(again->leaving, RankSet(1));
  cluster_.coordinator().accept(*again, {});
  EXPECT_THAT(cluster_.decide()->errors, SizeIs(1));
}

TEST_F(SetReplayEntry, APendingChangeOfTheSetsPreventsIt) {
  warm_up(2);
  cluster_.submit(0, making({0, 1}));
  EXPECT_THAT(enters(step(2), 2), ElementsAre(false, false, false));
}

TEST_F(SetReplayEntry, ASetOnAGpuIsNotReplayed) {
  wire::Request request = request_of_set(allreduce("a"), 2);
  request.device = DeviceType::kCuda;
  for (int i = 0; i < 6; ++i) {
    for (const int rank : {1, 2}) cluster_.submit(rank, request);
    EXPECT_THAT(enters(cluster_.exchange(), 2), ElementsAre(false, false, false));
  }
}

TEST_F(SetReplayEntry, InAJobOfSeveralHostsNoSetIsReplayed) {
  CoordinatorOptions options = replaying_sets();
  options.replays_sets = false;
  Cluster cluster(2, options);
  for (const int rank : {0, 1}) cluster.submit(rank, making({0, 1}));
  cluster.exchange();
  for (int i = 0; i < 6; ++i) {
    cluster.submit_everywhere(request_of_set(allreduce("a"), 1));
    for (const Applied& applied : cluster.exchange()) EXPECT_THAT(applied.replay, IsEmpty());
  }
}

TEST_F(SetReplayEntry, AReplayThatDidNotLastMakesTheNextOneOfItsSetWait) {
  warm_up(1);
  warm_up(2);
  step(1);
  step(2);
  cluster_.coordinator().end_replay(2, 1);
  cluster_.coordinator().end_replay(1, 100);
  cluster_.coordinator().end_replay(77, 1);  // has been removed
  EXPECT_THAT(enters(step(1), 1), ElementsAre(true, true, false)) << "the schedule is known";
  EXPECT_THAT(enters(step(2), 2), ElementsAre(false, true, true));
  cluster_.coordinator().end_replay(2, 1);
  EXPECT_THAT(enters(step(2), 2), ElementsAre(false, false, false));
  EXPECT_THAT(enters(step(2), 2), ElementsAre(false, true, true));
}

// With a small cache another set may take the slot of an operation of the current step.
TEST_F(SetReplayEntry, ADisplacedOperationIsNotReplayed) {
  CoordinatorOptions options = replaying_sets();
  options.cache_capacity = 2;
  Cluster cluster(2, options);
  for (const int rank : {0, 1}) cluster.submit(rank, making({0, 1}));
  cluster.exchange();
  for (int i = 0; i < 20; ++i) {
    for (const char* const name : {"a", "b"}) {
      cluster.submit_everywhere(request_of_set(allreduce(name), 1));
      cluster.submit_everywhere(allreduce(numbered("other", static_cast<std::uint64_t>(i))));
      for (const Applied& applied : cluster.exchange()) EXPECT_THAT(applied.replay, IsEmpty());
    }
  }
}

TEST(MayReplay, OneSetOfEachFlag) {
  ProcessSetTable sets(2);
  while (!sets.contains(2 * kArrivalFlags + 1)) sets.add({0, 1});
  EXPECT_TRUE(may_replay(sets, 0));
  EXPECT_TRUE(may_replay(sets, 1));
  EXPECT_TRUE(may_replay(sets, kArrivalFlags - 1));
  EXPECT_FALSE(may_replay(sets, kArrivalFlags)) << "the flag of all ranks";
  EXPECT_FALSE(may_replay(sets, kArrivalFlags + 1));
  sets.remove(1);
  EXPECT_FALSE(may_replay(sets, 1)) << "it does not exist";
  EXPECT_TRUE(may_replay(sets, kArrivalFlags + 1));
  EXPECT_FALSE(may_replay(sets, 2 * kArrivalFlags + 1));
}

// A removed set's flags must not look like arrivals in a replay of the next set with that flag.
TEST(SetReplay, FlagsOfARemovedSetAreNotTakenForNewOnes) {
  ArrivalFlags flags[2] = {};
  const auto make = [&](std::size_t own, int process_set) {
    return ScheduleReplay({&flags[0], &flags[1]}, own, nullptr, process_set);
  };
  const auto schedule = [] {
    AgreedBatch batch;
    batch.operations.push_back({allreduce("a")});
    return std::vector<AgreedBundle>{{batch}};
  };
  {
    ScheduleReplay first = make(0, 1), second = make(1, 1);
    for (ScheduleReplay* const one : {&first, &second}) {
      one->enter(schedule());
      one->leave_soon();
      EXPECT_EQ(one->advance().outcome, ScheduleReplay::Outcome::kLeft);
    }
  }
  ScheduleReplay first = make(0, 1 + kArrivalFlags);
  first.enter(schedule());
  SchedulePlace place;
  EXPECT_TRUE(first.offer(allreduce("a"), place));
  EXPECT_EQ(first.advance().outcome, ScheduleReplay::Outcome::kNothing);
}

}  // namespace
}  // namespace hvd::control
