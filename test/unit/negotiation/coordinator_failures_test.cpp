// Stalls, tombstones and ranks that leave, also with groups.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "negotiation/coordinator.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

CoordinatorOptions with_stalls() {
  CoordinatorOptions options;
  options.stall = {seconds(30), seconds(600)};
  return options;
}

TEST(CoordinatorFailures, AStalledOperationEndsOnTheRanksThatWaitAndAtTheMissingOnesNextUse) {
  Cluster cluster(3, with_stalls());
  cluster.submit(0, allreduce("a"));
  cluster.submit(1, allreduce("a"));
  cluster.exchange();
  cluster.now = seconds(30);
  EXPECT_THAT(cluster.coordinator().stall_warnings(cluster.now), SizeIs(1));
  EXPECT_EQ(cluster.coordinator().next_deadline(), TimePoint(seconds(600)));
  cluster.now = seconds(599);
  EXPECT_FALSE(cluster.decide());
  cluster.now = seconds(600);
  const auto plan = cluster.decide();
  ASSERT_TRUE(plan);
  ASSERT_THAT(plan->errors, SizeIs(1));
  EXPECT_EQ(plan->errors[0].code, StatusCode::kStalled);
  EXPECT_THAT(plan->errors[0].missing, ElementsAre(2));
  EXPECT_FALSE(cluster.coordinator().waiting());
  const auto applied = cluster.apply_everywhere();
  EXPECT_THAT(error_of(applied[0], "a"), HasSubstr("missing: rank 2 (host2)"));
  EXPECT_EQ(error_of(applied[1], "a"), error_of(applied[0], "a"));
  EXPECT_THAT(applied[2].errors, IsEmpty());
  EXPECT_EQ(cluster.submit(2, allreduce("a"))->message, error_of(applied[0], "a"));
  // The next use succeeds on all ranks.
  cluster.submit_everywhere(allreduce("a"));
  for (const Applied& next : cluster.exchange()) EXPECT_THAT(next.batches, SizeIs(1));
}

TEST(CoordinatorFailures, AnOperationThatGoesOnAfterAWarningIsReportedOnce) {
  Cluster cluster(2, with_stalls());
  cluster.submit(0, allreduce("a"));
  cluster.submit(0, allreduce("b"));
  cluster.exchange();
  cluster.now = seconds(40);
  EXPECT_THAT(cluster.coordinator().stall_warnings(cluster.now),
              ElementsAre(HasSubstr("allreduce 'a' and 1 more operation have waited 40.0 s")));
  EXPECT_THAT(cluster.coordinator().resumptions(), IsEmpty());
  cluster.now = seconds(45);
  cluster.submit(1, allreduce("a"));
  cluster.submit(1, allreduce("b"));
  cluster.exchange();
  EXPECT_THAT(cluster.coordinator().resumptions(),
              ElementsAre(HasSubstr("allreduce 'a' and 1 more operation go on after 45.0 s")));
  EXPECT_THAT(cluster.coordinator().resumptions(), IsEmpty());
}

/// Rank 0 waits for "x", rank 1 for "y", and rank 2 does not wait.
class EveryRankWaits : public ::testing::Test {
 protected:
  EveryRankWaits() : cluster_(3, options()) {
    cluster_.submit(0, allreduce("x"));
    cluster_.submit(1, allreduce("y"));
    cluster_.exchange();
  }
  static CoordinatorOptions options() {
    CoordinatorOptions options = with_stalls();
    options.stall.deadlock = seconds(10);
    return options;
  }
  void report_blocked(std::initializer_list<int> ranks) {
    for (const int rank : ranks)
      cluster_.coordinator().record_blocked(rank, cluster_.rank(rank).last_applied());
  }
  std::optional<wire::Plan> decide_at(int second) {
    cluster_.now = seconds(second);
    return cluster_.decide();
  }
  Cluster cluster_;
};

TEST_F(EveryRankWaits, TheErrorListsTheOperationsOfEachRank) {
  cluster_.submit(2, allreduce("y"));
  cluster_.exchange();
  report_blocked({0, 1, 2});
  EXPECT_FALSE(decide_at(9));
  const auto plan = decide_at(10);
  ASSERT_TRUE(plan);
  ASSERT_THAT(plan->errors, SizeIs(2));
  EXPECT_EQ(plan->errors[0].code, StatusCode::kStalled);
  const auto applied = cluster_.apply_everywhere();
  EXPECT_EQ(
      error_of(applied[0], "x"),
      "allreduce 'x': every rank waits for another, and none has submitted anything for 10.0 "
      "s (deadlock_timeout): rank 0 (host0): waits for "
      "allreduce 'x'; ranks 1 and 2: waits for allreduce 'y'; every rank must submit the same "
      "operations before it waits");
  EXPECT_THAT(error_of(applied[2], "y"), HasSubstr("allreduce 'y': every rank waits"));
}

TEST_F(EveryRankWaits, UnlessOneComputes) {
  report_blocked({0, 1});
  EXPECT_FALSE(decide_at(100));
}

TEST_F(EveryRankWaits, UnlessSomethingIsSubmittedMeanwhile) {
  report_blocked({0, 1, 2});
  cluster_.now = seconds(9);
  cluster_.submit(2, allreduce("z"));
  cluster_.exchange();
  EXPECT_FALSE(decide_at(15));
  report_blocked({0, 1, 2});
  EXPECT_FALSE(decide_at(18));
  EXPECT_TRUE(decide_at(19));
}

TEST_F(EveryRankWaits, UnlessItHasNotAppliedTheLastPlan) {
  for (int rank = 0; rank < 3; ++rank) cluster_.submit(rank, allreduce("done"));
  cluster_.report_all();
  ASSERT_TRUE(cluster_.decide());
  report_blocked({0, 1, 2});
  EXPECT_FALSE(decide_at(100));
}

TEST_F(EveryRankWaits, OrHasCalledShutdown) {
  cluster_.submit(2, allreduce("x"));
  cluster_.submit(2, allreduce("y"));
  cluster_.rank(2).request_shutdown();
  cluster_.report_all();
  report_blocked({0, 1});
  const auto plan = decide_at(10);
  ASSERT_TRUE(plan);
  ASSERT_THAT(plan->errors, SizeIs(2));
  EXPECT_THAT(plan->errors[0].message, HasSubstr("rank 2 (host2): has called shutdown()"));
}

// Rank 1's report is under way when the others give up: it belongs to the failed use, though it
// arrives afterwards.
TEST(CoordinatorFailures, ARequestThatCrossesTheErrorOfItsUseIsNotTakenForTheNext) {
  Cluster cluster(2, with_stalls());
  cluster.submit(0, allreduce("a"));
  cluster.report(0);
  cluster.submit(1, allreduce("a"));
  const wire::Bytes crossing = cluster.send(1);
  cluster.now = seconds(700);
  EXPECT_TRUE(cluster.decide());
  EXPECT_EQ(cluster.coordinator().failed_uses(), 1u);
  cluster.apply(0);
  cluster.submit(0, allreduce("a"));
  cluster.report(0);
  cluster.arrive(crossing);
  EXPECT_FALSE(cluster.decide());
  EXPECT_THAT(cluster.apply(1).errors, SizeIs(1));
  EXPECT_FALSE(cluster.submit(1, allreduce("a")));
  cluster.report(1);
  EXPECT_EQ(cluster.coordinator().failed_uses(), 0u);
  EXPECT_TRUE(cluster.decide());
}

TEST(CoordinatorFailures, SeveralMissedUsesEndOneByOne) {
  Cluster cluster(2, with_stalls());
  for (int use = 0; use < 2; ++use) {
    cluster.submit(0, allreduce("a", {use + 1}));
    cluster.report(0);
    cluster.now += seconds(700);
    cluster.decide();
    cluster.apply_everywhere();
  }
  EXPECT_TRUE(cluster.submit(1, allreduce("a", {1})));
  EXPECT_TRUE(cluster.submit(1, allreduce("a", {2})));
  cluster.submit_everywhere(allreduce("a", {3}));
  for (const Applied& applied : cluster.exchange()) EXPECT_THAT(applied.batches, SizeIs(1));
}

TEST(CoordinatorFailures, FailedUsesAreForgottenOnceTheRankHasAppliedTheError) {
  Cluster cluster(2, with_stalls());
  for (int i = 0; i < 20; ++i)
    cluster.submit(0, allreduce(numbered("lost", static_cast<std::uint64_t>(i))));
  cluster.report(0);
  cluster.now = seconds(700);
  cluster.decide();
  EXPECT_EQ(cluster.coordinator().failed_uses(), 20u);
  cluster.apply_everywhere();
  cluster.submit(1, allreduce("other"));
  cluster.report(1);
  EXPECT_EQ(cluster.coordinator().failed_uses(), 0u);
}

TEST(CoordinatorFailures, EachStallTextListsTheOthersOperations) {
  Cluster cluster(2, with_stalls());
  cluster.submit(0, allreduce("mine"));
  cluster.submit(1, allreduce("yours"));
  cluster.report_all();
  cluster.now = seconds(700);
  const auto plan = cluster.decide();
  ASSERT_THAT(plan->errors, SizeIs(2));
  EXPECT_THAT(plan->errors[0].message, HasSubstr("waits for allreduce 'yours'"));
  EXPECT_THAT(plan->errors[1].message, HasSubstr("waits for allreduce 'mine'"));
}

TEST(CoordinatorFailures, TheLastActivityIsTheNameOfAnUnnamedHitToo) {
  Cluster cluster(2, with_stalls());
  cluster.submit_everywhere(unnamed(OpKind::kAllreduce, 0));
  cluster.exchange();
  cluster.submit_everywhere(unnamed(OpKind::kAllreduce, 1));
  cluster.exchange();
  cluster.submit(0, allreduce("a"));
  cluster.report(0);
  cluster.now = seconds(30);
  EXPECT_THAT(cluster.coordinator().stall_warnings(cluster.now),
              ElementsAre(HasSubstr("last submitted 'allreduce.unnamed.1' 30.0 s ago")));
}

TEST(CoordinatorFailures, AnOperationThatWaitsForARankThatHasLeftEnds) {
  Cluster cluster(3);
  cluster.submit(0, allreduce("a"));
  cluster.submit(1, allreduce("a"));
  cluster.rank(2).request_shutdown();
  const auto applied = cluster.exchange();
  EXPECT_EQ(error_of(applied[1], "a"),
            "allreduce 'a': rank 2 (host2) has called shutdown() without submitting it; every rank "
            "must submit the same operations "
            "before it leaves; a rank with fewer batches than the others calls hvd::join() after "
            "its last batch");
  EXPECT_EQ(applied[1].errors.at(0).code, StatusCode::kShutdown);
  EXPECT_FALSE(applied[1].shutdown);
  EXPECT_FALSE(cluster.coordinator().all_shut_down());
  // Later operations end too.
  cluster.submit(0, allreduce("b"));
  EXPECT_THAT(error_of(cluster.exchange()[0], "b"),
              HasSubstr("rank 2 (host2) has called shutdown()"));
}

TEST(CoordinatorFailures, ARankThatEndsWithoutShutdownIsReportedAsThat) {
  Cluster cluster(3);
  cluster.submit(0, allreduce("a"));
  cluster.rank(2).request_shutdown(/*ended=*/true);
  EXPECT_EQ(error_of(cluster.exchange()[0], "a"),
            "allreduce 'a': rank 2 (host2) ended without shutdown() and without submitting it; see "
            "its output and its exit code for the cause");
}

TEST(CoordinatorFailures, OperationsSubmittedBeforeShutdownRun) {
  Cluster cluster(2);
  cluster.submit(1, allreduce("a"));
  cluster.rank(1).request_shutdown();
  cluster.exchange();
  cluster.submit(0, allreduce("a"));
  cluster.rank(0).request_shutdown();
  const auto applied = cluster.exchange();
  EXPECT_THAT(applied[1].batches, SizeIs(1));
  EXPECT_TRUE(applied[0].shutdown);
  EXPECT_TRUE(applied[1].shutdown);
  EXPECT_FALSE(cluster.decide());
}

TEST(CoordinatorFailures, SiblingsOfAStalledMemberEndAsStalledToo) {
  Cluster cluster(2, with_stalls());
  cluster.submit_everywhere(in_group(allreduce("a"), "g", 2, 0));
  cluster.report_all();
  cluster.now = seconds(1);
  cluster.submit(0, in_group(allreduce("b"), "g", 2, 1));
  cluster.report(0);
  cluster.now = seconds(601);
  const auto plan = cluster.decide();
  ASSERT_THAT(plan->errors, SizeIs(2));
  for (const auto& error : plan->errors) EXPECT_EQ(error.code, StatusCode::kStalled);
  EXPECT_FALSE(cluster.coordinator().waiting());
}

TEST(CoordinatorFailures, AMemberOfAGroupThatStaysIncompleteStalls) {
  Cluster cluster(2, with_stalls());
  cluster.submit_everywhere(in_group(allreduce("a"), "g", 2, 0));
  cluster.exchange();
  EXPECT_EQ(cluster.coordinator().next_deadline(), TimePoint(seconds(30)));
  cluster.now = seconds(600);
  const auto plan = cluster.decide();
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->errors.at(0).code, StatusCode::kStalled);
  EXPECT_THAT(plan->errors.at(0).missing, IsEmpty());
}

TEST(CoordinatorFailures, AMemberWhoseGroupWillNeverBeCompleteEndsWithTheShutdown) {
  Cluster cluster(2);
  cluster.submit_everywhere(in_group(allreduce("a"), "g", 2, 0));
  cluster.exchange();
  cluster.rank(1).request_shutdown();
  EXPECT_THAT(error_of(cluster.exchange()[0], "a"),
              HasSubstr("without submitting the rest of its group"));
  cluster.rank(0).request_shutdown();
  EXPECT_TRUE(cluster.exchange()[0].shutdown);
}

}  // namespace
}  // namespace hvd::control
