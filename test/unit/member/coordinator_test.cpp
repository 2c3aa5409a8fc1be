#include "member/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "coordinator_job.h"

namespace hvd::member {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

TEST_F(CoordinatorTest, FormsTheFirstGenerationWhenAllHaveJoined) {
  make(2, 1, 4);
  join(1);
  EXPECT_EQ(last<Reset>(1).generation, 1u);
  ready(1);
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kCollecting);
  join(2);
  ready(2);
  EXPECT_THAT(seats(1), ElementsAre(1, 2));
  EXPECT_TRUE(last<Assign>(2).load);
  EXPECT_FALSE(last<Assign>(2).seats[0].receives);
  EXPECT_TRUE(last<Assign>(2).seats[1].receives);
  synced(2, 0);
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kForming);
  synced(1, 0);
  EXPECT_EQ(last<Go>(2), Go{1});
}

TEST_F(CoordinatorTest, ADeathIsRepairedByTheSurvivorsAlone) {
  run(3);
  coordinator_->worker_ended(2, "signal 9", now_);
  EXPECT_EQ(last<Reset>(1).generation, 2u);
  EXPECT_THAT(last<Reset>(3).cause, HasSubstr("signal 9"));
  whole(1, 4);
  whole(3, 5);
  EXPECT_THAT(seats(1), ElementsAre(1, 3));
  EXPECT_EQ(last<Assign>(1).root, 1u);
  EXPECT_TRUE(last<Assign>(1).seats[0].receives);
  ASSERT_THAT(coordinator_->losses(), SizeIs(1));
  EXPECT_EQ(coordinator_->losses()[0].worker, 2u);
  EXPECT_EQ(coordinator_->losses()[0].generation, 1u);
  EXPECT_EQ(coordinator_->resets(), 1);
}

TEST_F(CoordinatorTest, AnAccusedMemberIsKilledAndTheOthersWaitForItsEnd) {
  run(3);
  coordinator_->receive(1, Failed{.generation = 1, .accused = 3, .cause = "silent"}, now_);
  take();
  EXPECT_THAT(killed_[3], HasSubstr("silent"));
  coordinator_->receive(3, Failed{.generation = 1, .accused = 1, .cause = "silent"}, now_);
  whole(1, 4);
  whole(2, 4);
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kCollecting)
      << "it may only have been stopped";
  coordinator_->worker_ended(3, "killed", now_);
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kForming);
  EXPECT_THAT(seats(1), ElementsAre(1, 2));
  EXPECT_THAT(killed_, SizeIs(1));
}

TEST_F(CoordinatorTest, AHostOnWhichAProcessDoesNotEndIsGivenUp) {
  run_on({"a", "b"}, 1, 4);
  join(3, "b");
  coordinator_->receive(1, Failed{.generation = 1, .accused = 2, .cause = "silent"}, now_);
  whole(1, 4);
  ready(3);
  pass(seconds(9));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kCollecting);
  pass(seconds(2));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kForming);
  EXPECT_THAT(seats(1), ElementsAre(1));
  EXPECT_THAT(killed_[3], HasSubstr("could not be ended"));
}

TEST_F(CoordinatorTest, AccusationsInAnEarlierGenerationCountNoMore) {
  run(3);
  coordinator_->worker_ended(2, "signal 9", now_);
  coordinator_->receive(1, Failed{.generation = 1, .accused = 3, .cause = "its end"}, now_);
  take();
  EXPECT_THAT(killed_, IsEmpty());
  EXPECT_EQ(coordinator_->generation(), 2u);
}

TEST_F(CoordinatorTest, AFailureWithoutAnAccusationCostsNoMember) {
  run(2);
  coordinator_->receive(1, Failed{.generation = 1, .cause = "mismatch"}, now_);
  whole(1, 4);
  whole(2, 4);
  EXPECT_THAT(seats(1), ElementsAre(1, 2));
  EXPECT_FALSE(last<Assign>(1).seats[1].receives);
  EXPECT_THAT(coordinator_->losses(), IsEmpty());
}

TEST_F(CoordinatorTest, AMemberThatDoesNotAnswerAResetIsLost) {
  run(3);
  coordinator_->receive(1, Failed{.generation = 1, .cause = "mismatch"}, now_);
  whole(1, 4);
  pass(seconds(29), {3});
  EXPECT_THAT(killed_, IsEmpty());
  pass(seconds(2), {3});
  EXPECT_THAT(killed_[3], HasSubstr("HVD_PEER_TIMEOUT"));
  EXPECT_FALSE(killed_.contains(2)) << "it computes, and responds";
}

TEST_F(CoordinatorTest, AMemberThatRespondsButDoesNotLeaveIsLostLater) {
  run(2);
  coordinator_->receive(1, Failed{.generation = 1, .cause = "mismatch"}, now_);
  whole(1, 4);
  pass(seconds(595));
  EXPECT_THAT(killed_, IsEmpty());
  pass(seconds(10));
  EXPECT_THAT(killed_[2], HasSubstr("has not entered generation 2"));
}

TEST_F(CoordinatorTest, ARootThatDoesNotGiveItsStateIsLost) {
  run(3);
  coordinator_->receive(1, Failed{.generation = 1, .cause = "mismatch"}, now_);
  whole(2, 5);
  whole(1, 4);
  whole(3, 4);
  synced(2, 5);
  pass(seconds(605));
  EXPECT_TRUE(killed_.contains(2));
  EXPECT_THAT(killed_, SizeIs(1));
}

TEST_F(CoordinatorTest, SurvivorsDoNotWaitForASlowCandidate) {
  run(2);
  join(3);
  coordinator_->worker_ended(2, "signal 9", now_);
  EXPECT_EQ(last<Reset>(3).generation, 2u);
  whole(1, 4);
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kCollecting);
  pass(milliseconds(10));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kForming) << "after the grace";
  EXPECT_THAT(seats(1), ElementsAre(1));
  synced(1, 4);
  pass(seconds(20));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kRunning);
  EXPECT_EQ(last<Go>(1), Go{2}) << "no change for a candidate that has not answered";
  ready(3);
  pass(milliseconds(1));
  EXPECT_EQ(last<Prepare>(1).generation, 2u);
}

TEST_F(CoordinatorTest, AReadyCandidateReplacesTheLostMemberAtOnce) {
  run(2, 1, 2);
  join(3);
  pass(seconds(5));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kRunning)
      << "the job is full, so it is a spare";
  coordinator_->worker_ended(1, "signal 9", now_);
  ready(3);
  whole(2, 4);
  EXPECT_THAT(seats(2), ElementsAre(2, 3));
  EXPECT_TRUE(last<Assign>(2).seats[1].receives);
}

TEST_F(CoordinatorTest, CandidatesJoinInOrderAtOneCommit) {
  run(2);
  join(3);
  pass(milliseconds(500));
  join(4);
  pass(milliseconds(400));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kRunning);
  pass(milliseconds(101));
  const Prepare prepare = last<Prepare>(1);
  coordinator_->receive(1, Begun{prepare.change, 7}, now_);
  coordinator_->receive(2, Begun{prepare.change, 8}, now_);
  EXPECT_EQ(last<Target>(1), (Target{.change = prepare.change, .commit = 9, .next = 2}));
  EXPECT_EQ(last<Reset>(3).generation, 2u);
  ready(3);
  ready(4);
  whole(1, 9);
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kCollecting);
  whole(2, 9);
  EXPECT_THAT(seats(1), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(last<Assign>(1).state.commit, 9u);
}

TEST_F(CoordinatorTest, AChangeThatIsNotReachedIsMadeTheHardWay) {
  run(2);
  join(3);
  pass(seconds(2));
  const Prepare prepare = last<Prepare>(1);
  coordinator_->receive(1, Begun{prepare.change, 7}, now_);
  pass(seconds(55));
  EXPECT_EQ(last<Prepare>(2), prepare);
  pass(seconds(10));
  EXPECT_THAT(last<Reset>(2).cause, HasSubstr("--change-patience"));
  EXPECT_THAT(killed_, IsEmpty());
}

TEST_F(CoordinatorTest, ADeathDuringAChangeStartsOver) {
  run(3);
  join(4);
  pass(seconds(2));
  begun({1, 2, 3}, 7);
  whole(1, 8);
  coordinator_->worker_ended(2, "signal 9", now_);
  EXPECT_EQ(last<Reset>(1).generation, 3u);
  whole(1, 8);
  whole(3, 7);
  ready(4);
  EXPECT_THAT(seats(1), ElementsAre(1, 3, 4));
  EXPECT_EQ(last<Assign>(1).state.commit, 8u);
  EXPECT_TRUE(last<Assign>(1).seats[1].receives);
}

TEST_F(CoordinatorTest, AHostLeavesInOrderUnlessItAloneHasTheState) {
  run_on({"a", "b"}, 1, 4);
  coordinator_->host_leaves("b", now_);
  begun({1, 2}, 7);
  // A failure comes in between, after which only the leaving host has commit 8.
  coordinator_->receive(1, Failed{.generation = 1, .cause = "mismatch"}, now_);
  whole(1, 7);
  whole(2, 8);
  EXPECT_THAT(seats(1), ElementsAre(1, 2));
  EXPECT_EQ(last<Assign>(1).root, 1u);
  synced(1, 8);
  synced(2, 8);
  begun({1, 2}, 8);
  whole(1, 9);
  whole(2, 9);
  EXPECT_THAT(seats(1), ElementsAre(1));
  last<End>(2);
  coordinator_->worker_ended(2, "exit 0", now_);
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kForming);
  EXPECT_THAT(coordinator_->losses(), IsEmpty());
}

TEST_F(CoordinatorTest, JoinersTakeThePlacesOfAHostThatLeaves) {
  run_on({"a", "b"}, 2, 2);
  coordinator_->host_leaves("b", now_);
  pass(seconds(2));
  EXPECT_EQ(last<Go>(1).generation, 1u) << "the job needs both";
  join(3, "c");
  pass(seconds(5));
  begun({1, 2}, 7);
  whole(1, 8);
  whole(2, 8);
  ready(3);
  EXPECT_THAT(seats(1), ElementsAre(1, 3));
  last<End>(2);
  EXPECT_THAT(coordinator_->losses(), IsEmpty());
}

TEST_F(CoordinatorTest, AHostThatAloneHasTheStateGivesItToTheJoinersFirst) {
  run_on({"a", "a"}, 2, 2);
  coordinator_->host_leaves("a", now_);
  join(3, "b");
  join(4, "b");
  pass(seconds(5));
  begun({1, 2}, 7);
  whole(1, 8);
  whole(2, 8);
  ready(3);
  ready(4);
  EXPECT_THAT(seats(1), ElementsAre(1, 3, 4)) << "one beyond the largest size";
  last<End>(2);
  for (const WorkerId id : {1, 3, 4}) synced(id, 8);
  begun({1, 3, 4}, 8);
  for (const WorkerId id : {1, 3, 4}) whole(id, 9);
  expect_last_two_go_on(9);
}

TEST_F(CoordinatorTest, MembersWithPartsOfTheStateLeaveAtACommitThatNamesThem) {
  divided_ = true;
  run_on({"a", "a", "b", "b"});
  coordinator_->host_leaves("b", now_);
  const std::vector<WorkerId> all = {1, 2, 3, 4};
  begun(all, 7);
  EXPECT_THAT(last<Target>(1).leaving, ElementsAre(3, 4));
  // A failure comes in between, so that not all ranks have sent their parts.
  coordinator_->receive(1, Failed{.generation = 1, .cause = "mismatch"}, now_);
  for (const WorkerId id : all) whole(id, 7);
  EXPECT_THAT(seats(1), ElementsAre(1, 2, 3, 4));
  for (const WorkerId id : all) synced(id, 7);
  begun(all, 7);
  EXPECT_THAT(last<Target>(1).leaving, ElementsAre(3, 4));
  coordinator_->worker_leaves(2, true, now_);  // the others do not send their parts to it any more
  for (const WorkerId id : all) whole(id, 8);
  EXPECT_THAT(seats(1), ElementsAre(1, 2));
  last<End>(3);
  last<End>(4);
}

TEST_F(CoordinatorTest, MembersWithPartsStayIfTheCommitThatHandsThemOnHasFailed) {
  divided_ = true;
  run_on({"a", "a", "b", "b"});
  coordinator_->host_leaves("b", now_);
  const std::vector<WorkerId> all = {1, 2, 3, 4};
  begun(all, 7);
  EXPECT_EQ(last<Target>(1).commit, 8U);
  for (const WorkerId id : all) whole(id, 7);
  EXPECT_THAT(seats(1), ElementsAre(1, 2, 3, 4));
  for (const WorkerId id : all) EXPECT_EQ(last<Assign>(id).state.commit, 7U);
  for (const WorkerId id : all) synced(id, 7);
  begun(all, 7);
  EXPECT_THAT(last<Target>(1).leaving, ElementsAre(3, 4));
  for (const WorkerId id : all) whole(id, 8);
  EXPECT_THAT(seats(1), ElementsAre(1, 2));
  last<End>(3);
  last<End>(4);
}

TEST_F(CoordinatorTest, AllMembersGiveTheirPartsOfTheStateToTheJoinersFirst) {
  divided_ = true;
  run_on({"a", "a"}, 2, 2);
  coordinator_->host_leaves("a", now_);
  join(3, "b");
  join(4, "b");
  pass(seconds(5));
  begun({1, 2}, 7);
  EXPECT_THAT(last<Target>(1).leaving, IsEmpty());
  for (const WorkerId id : {1, 2}) whole(id, 8);
  for (const WorkerId id : {3, 4}) ready(id);
  const std::vector<WorkerId> all = {1, 2, 3, 4};
  EXPECT_THAT(seats(1), ElementsAre(1, 2, 3, 4)) << "two beyond the largest size";
  for (const WorkerId id : all) synced(id, 8);
  begun(all, 8);
  EXPECT_THAT(last<Target>(3).leaving, ElementsAre(1, 2));
  for (const WorkerId id : all) whole(id, 9);
  expect_last_two_go_on(9);
}

TEST_F(CoordinatorTest, TheLastMemberGoesOnAlone) {
  divided_ = true;
  run_on({"a", "b"});
  coordinator_->host_leaves("b", now_);
  begun({1, 2}, 7);
  for (const WorkerId id : {1, 2}) whole(id, 8);
  EXPECT_THAT(seats(1), ElementsAre(1));
}

TEST_F(CoordinatorTest, AJoinerThatIsLateDoesNotTakeAPlace) {
  run_on({"a", "b"}, 2, 2);
  coordinator_->host_leaves("b", now_);
  join(3, "c");
  pass(seconds(5));
  begun({1, 2}, 7);
  whole(1, 8);
  whole(2, 8);
  pass(seconds(1));
  EXPECT_THAT(seats(1), ElementsAre(1, 2));
}

TEST_F(CoordinatorTest, AWorkerLeavesInOrderUnlessItMayStayAgain) {
  run(3, 1, 3);
  coordinator_->worker_leaves(3, true, now_);
  const Prepare prepare = last<Prepare>(1);
  coordinator_->worker_leaves(3, false, now_);
  for (const WorkerId id : {1, 2, 3}) coordinator_->receive(id, Begun{prepare.change, 4}, now_);
  for (const WorkerId id : {1, 2, 3}) whole(id, 5);
  EXPECT_THAT(seats(1), ElementsAre(1, 2, 3));
  for (const WorkerId id : {1, 2, 3}) synced(id, 5);
  coordinator_->worker_leaves(2, true, now_);
  begun({1, 2, 3}, 6);
  for (const WorkerId id : {1, 2, 3}) whole(id, 7);
  EXPECT_THAT(seats(1), ElementsAre(1, 3));
  last<End>(2);
}

TEST_F(CoordinatorTest, ASpareThatIsToLeaveEndsAtOnce) {
  run_on({"a", "b"}, 1, 2);
  join(3, "c");
  coordinator_->host_leaves("c", now_);
  last<End>(3);
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kRunning);
}

TEST_F(CoordinatorTest, WithoutSurvivorsTheLeaseOfALostHostPassesFirst) {
  make(1, 1, 4);
  join(1, "a");
  coordinator_->receive(1, Ready{.generation = 1, .state = {.commit = 0}, .can_load = true}, now_);
  synced(1, 0);
  join(2, "b");
  coordinator_->host_lost("a", now_);
  coordinator_->receive(2, Ready{.generation = 2, .can_load = true}, now_);
  pass(seconds(12));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kCollecting);
  pass(seconds(1));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kForming);
  EXPECT_TRUE(last<Assign>(2).load);
}

TEST_F(CoordinatorTest, ASilentHostIsLostWithAllItsWorkersWhichAreKilledIfTheyReturn) {
  run_on({"a", "b"}, 1, 4);
  pass(seconds(9), {}, {"b"});
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kRunning);
  pass(seconds(2), {}, {"b"});
  EXPECT_EQ(last<Reset>(1).generation, 2u);
  whole(1, 4);
  EXPECT_THAT(seats(1), ElementsAre(1)) << "its processes share no memory with the survivor";
  take();
  killed_.clear();
  coordinator_->receive(2, AtEnd{1}, now_);
  take();
  EXPECT_THAT(killed_[2], HasSubstr("no longer belongs"));
}

TEST_F(CoordinatorTest, TimeInWhichHvdrunWasStoppedDoesNotCount) {
  run(2);
  coordinator_->receive(1, Failed{.generation = 1, .cause = "mismatch"}, now_);
  take();
  now_ += std::chrono::hours(1);
  coordinator_->check(now_);
  take();
  EXPECT_THAT(killed_, IsEmpty());
  EXPECT_FALSE(coordinator_->outcome());
}

TEST_F(CoordinatorTest, AJoinerThatIsLateOrOfAnotherProgramDoesNotDisturb) {
  run(2);
  coordinator_->worker_started(3, "a", now_);
  coordinator_->worker_started(4, "a", now_);
  coordinator_->receive(4, Join{"another"}, now_);
  EXPECT_THAT(last<Refused>(4).reason, HasSubstr("the job's program is 'program'"));
  pass(seconds(301));
  EXPECT_THAT(killed_[3], HasSubstr("--start-timeout"));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kRunning);
  EXPECT_EQ(coordinator_->generation(), 1u);
}

TEST_F(CoordinatorTest, TheJobEndsWhenAllAreAtTheirEnd) {
  run(2);
  join(3);
  coordinator_->receive(1, AtEnd{1}, now_);
  EXPECT_FALSE(coordinator_->outcome());
  coordinator_->worker_ended(1, "signal 9", now_);
  whole(2, 5);
  pass(milliseconds(20));
  synced(2, 5);
  coordinator_->receive(2, AtEnd{1}, now_);
  EXPECT_FALSE(coordinator_->outcome()) << "of an earlier generation";
  coordinator_->receive(2, AtEnd{2}, now_);
  EXPECT_EQ(coordinator_->outcome(), Outcome::kComplete);
  last<End>(2);
  last<End>(3);
  coordinator_->worker_ended(2, "exit 0", now_);
  EXPECT_THAT(coordinator_->losses(), SizeIs(1));
}

TEST_F(CoordinatorTest, ExceptionsInARowAtTheSameOrAnEarlierCommitEndTheJob) {
  coordinator_.emplace(
      CoordinatorOptions{.start_size = 2, .min_np = 1, .max_np = 2, .max_failures = 3}, now_);
  WorkerId last_worker = 0;
  /// A generation of two new workers that begins at commit 0, in which both throw.
  const auto fail_at = [&](Commit commit) {
    const WorkerId a = ++last_worker, b = ++last_worker;
    for (const WorkerId id : {a, b}) join(id);
    const Ready loads{.generation = coordinator_->generation(), .can_load = true};
    for (const WorkerId id : {a, b}) coordinator_->receive(id, loads, now_);
    for (const WorkerId id : {a, b}) synced(id, 0);
    for (const WorkerId id : {b, a})
      coordinator_->receive(id, ProgramFailed{coordinator_->generation(), commit, "no such file"},
                            now_);
    if (coordinator_->outcome()) return;
    for (const WorkerId id : {a, b}) coordinator_->worker_ended(id, "exit code 1", now_);
  };
  for (const Commit commit : {4, 5, 6, 3}) fail_at(commit);
  EXPECT_FALSE(coordinator_->outcome()) << "5 is after 4, and 6 after 5";
  fail_at(6);
  EXPECT_EQ(coordinator_->outcome(), Outcome::kFailsAgain) << "6 is after 3, but not after 6";
  EXPECT_EQ(coordinator_->failure(), "rank 1 (worker 10 on a) at commit 6: no such file");
}

TEST_F(CoordinatorTest, AStateThatDiffersAfterTheBroadcastIsNotRunWith) {
  run(3);
  coordinator_->receive(1, Failed{.generation = 1, .cause = "mismatch"}, now_);
  for (const WorkerId id : {1, 2, 3}) whole(id, 4);
  synced(1, 4);
  synced(2, 4, 9);
  synced(3, 4);
  take();
  EXPECT_THAT(killed_[2], HasSubstr("differs"));
  EXPECT_EQ(coordinator_->phase(), Coordinator::Phase::kCollecting);
}

TEST_F(CoordinatorTest, EndsBelowTheLeastNumberWithoutAStateAndAtTheLimitOfResets) {
  run(2, 2);
  coordinator_->worker_ended(2, "signal 9", now_);
  whole(1, 4);
  pass(seconds(595));
  EXPECT_FALSE(coordinator_->outcome());
  pass(seconds(10));
  EXPECT_EQ(coordinator_->outcome(), Outcome::kTooFew);
  EXPECT_THAT(killed_, SizeIs(1));

  run(2);
  coordinator_->worker_ended(2, "signal 9", now_);
  ready(1);
  EXPECT_EQ(coordinator_->outcome(), Outcome::kStateLost);

  run(2, 1, 8, 0);
  coordinator_->worker_ended(2, "signal 9", now_);
  EXPECT_EQ(coordinator_->outcome(), Outcome::kTooManyResets);
}

}  // namespace
}  // namespace hvd::member
