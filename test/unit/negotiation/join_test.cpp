// Ranks that have no more data.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "hvd/error.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

wire::Request join_request(std::uint64_t ordinal = 0) {
  return unnamed(OpKind::kJoin, ordinal, {0});
}

TEST(Join, OthersGoOnWithoutTheRankThatHasJoined) {
  Cluster cluster(3);
  cluster.submit(1, join_request());
  cluster.report(1);
  cluster.submit(0, allreduce("a"));
  cluster.submit(2, allreduce("a"));
  const auto applied = cluster.exchange();
  for (int rank = 0; rank < 3; ++rank) {
    const auto& batches = applied[static_cast<std::size_t>(rank)].batches;
    ASSERT_THAT(batches, SizeIs(1));
    EXPECT_THAT(batches[0].absent, ElementsAre(1));
    EXPECT_EQ(batches[0].absent_here, rank == 1);
    EXPECT_EQ(batches[0].operations[0].request.name, "a");
  }
}

TEST(Join, EarlierRequestsOfTheRankStillCount) {
  Cluster cluster(2);
  cluster.submit(1, allreduce("a"));
  cluster.submit(1, join_request());
  cluster.exchange();
  cluster.submit(0, allreduce("a"));
  const auto applied = cluster.exchange();
  EXPECT_THAT(applied[1].batches.at(0).absent, IsEmpty());
  EXPECT_FALSE(applied[1].batches.at(0).absent_here);
}

TEST(Join, AnOperationThatWaitedForItGoesAhead) {
  Cluster cluster(2);
  cluster.submit(0, allreduce("a"));
  cluster.report(0);
  EXPECT_FALSE(cluster.decide());
  cluster.submit(1, join_request());
  EXPECT_THAT(cluster.exchange()[0].batches.at(0).absent, ElementsAre(1));
}

TEST(Join, EndsWhenAllHaveJoinedAndReturnsTheLastRank) {
  Cluster cluster(3);
  for (const int rank : {2, 0, 1}) {
    cluster.submit(rank, join_request());
    cluster.report(rank);
  }
  cluster.decide();
  for (const Applied& applied : cluster.apply_everywhere()) {
    EXPECT_EQ(applied.batches.at(0).result, 1);
  }
  // No rank is joined any more.
  cluster.submit(0, allreduce("a"));
  EXPECT_THAT(cluster.exchange()[0].batches, IsEmpty());
  cluster.submit(1, allreduce("a"));
  cluster.submit(2, allreduce("a"));
  EXPECT_THAT(cluster.exchange()[0].batches.at(0).absent, IsEmpty());
}

TEST(Join, CachedTensorsGoOnAsBits) {
  Cluster cluster(2);
  for (int use = 0; use < 2; ++use) {
    cluster.submit_everywhere(allreduce("a"));
    cluster.exchange();
  }
  cluster.submit(1, join_request());
  cluster.report(1);
  cluster.submit(0, allreduce("a"));
  cluster.report(0);
  const auto plan = cluster.decide();
  ASSERT_TRUE(plan);
  EXPECT_TRUE(std::holds_alternative<wire::SlotUse>(plan->batches.at(0).tensors.at(0)));
  EXPECT_THAT(plan->batches.at(0).absent, ElementsAre(1));
  EXPECT_TRUE(cluster.apply_everywhere()[1].batches.at(0).absent_here);
}

TEST(Join, AnAllgatherCountsNoRowsOfIt) {
  Cluster cluster(2);
  for (int use = 0; use < 2; ++use) {
    cluster.submit(0, allgather("a", {2, 3}));
    cluster.submit(1, allgather("a", {5, 3}));
    cluster.exchange();
  }
  cluster.submit(0, join_request());
  cluster.report(0);
  cluster.submit(1, allgather("a", {5, 3}));
  const auto applied = cluster.exchange();
  EXPECT_THAT(applied[0].batches.at(0).operations.at(0).first_dims, ElementsAre(0, 5));
  EXPECT_THAT(applied[1].batches.at(0).operations.at(0).first_dims, ElementsAre(0, 5));
}

TEST(Join, TensorsWithDifferentAbsentRanksDoNotShareABatch) {
  Cluster cluster(2);
  cluster.submit(1, allreduce("early"));
  cluster.submit(1, join_request());
  cluster.report(1);
  cluster.submit(0, allreduce("early"));
  cluster.submit(0, allreduce("late"));
  EXPECT_THAT(cluster.exchange()[0].batches, SizeIs(2));
}

TEST(Join, AGroupIsCompletedWithoutIt) {
  Cluster cluster(2);
  cluster.submit(1, join_request());
  cluster.report(1);
  cluster.submit(0, in_group(allreduce("a"), "g", 2, 0));
  EXPECT_THAT(cluster.exchange()[0].batches, IsEmpty());
  cluster.submit(0, in_group(allreduce("b"), "g", 2, 1));
  const auto applied = cluster.exchange();
  ASSERT_THAT(applied[1].batches, SizeIs(1));
  EXPECT_THAT(applied[1].batches[0].operations, SizeIs(2));
}

TEST(Join, OptionsThatNeedItFailWithoutIt) {
  Cluster cluster(2);
  cluster.submit(1, join_request());
  cluster.report(1);
  wire::Request broadcast = allreduce("b");
  broadcast.kind = OpKind::kBroadcast;
  broadcast.root = 1;
  cluster.submit(0, broadcast);
  wire::Request alltoall = allreduce("t", {0, 2});
  alltoall.kind = OpKind::kAlltoall;
  cluster.submit(0, alltoall);
  const auto applied = cluster.exchange();
  ASSERT_THAT(applied[0].errors, SizeIs(2));
  EXPECT_EQ(applied[0].errors[0].message, "broadcast 'b': rank 1, its root, has called join()");
  EXPECT_THAT(applied[0].errors[1].message,
              HasSubstr("rank 1 has called join(), and alltoall has no meaning without it"));
  EXPECT_EQ(applied[0].errors[0].code, StatusCode::kMismatch);
  EXPECT_THAT(applied[1].errors, IsEmpty());
  // The next operation works.
  cluster.submit(0, allreduce("a"));
  EXPECT_THAT(cluster.exchange()[1].batches, SizeIs(1));
}

TEST(Join, IsNoStallWhileOthersAreAtWork) {
  CoordinatorOptions options;
  options.stall = {seconds(30), seconds(600)};
  Cluster cluster(2, options);
  cluster.submit(1, join_request());
  cluster.report(1);
  for (int step = 0; step < 100; ++step) {
    cluster.now += seconds(20);
    cluster.submit(0, allreduce("a"));
    EXPECT_THAT(cluster.exchange()[0].batches, SizeIs(1));
    EXPECT_THAT(cluster.coordinator().stall_warnings(cluster.now), IsEmpty());
  }
  cluster.now += seconds(30);
  EXPECT_THAT(cluster.coordinator().stall_warnings(cluster.now), SizeIs(1));
  cluster.now += seconds(600);
  cluster.decide();
  const auto applied = cluster.apply_everywhere();
  ASSERT_THAT(applied[1].errors, SizeIs(1));
  EXPECT_EQ(applied[1].errors[0].code, StatusCode::kStalled);
  // Rank 1 is no longer joined. Rank 0, which was missing, gets the error when it joins.
  EXPECT_TRUE(cluster.submit(0, join_request()));
  cluster.submit_everywhere(allreduce("a"));
  EXPECT_THAT(cluster.exchange()[1].batches.at(0).absent, IsEmpty());
}

TEST(Join, DependentTestsFailWithIt) {
  CoordinatorOptions options;
  options.stall = {seconds(30), seconds(600)};
  Cluster cluster(3, options);
  cluster.submit(2, join_request());
  cluster.submit(0, allreduce("a"));
  cluster.report_all();
  cluster.now += seconds(601);  // rank 1 is silent
  cluster.decide();
  const auto applied = cluster.apply_everywhere();
  ASSERT_THAT(applied[0].errors, SizeIs(1));
  EXPECT_EQ(applied[0].errors[0].name, "a");
  EXPECT_THAT(applied[2].errors, SizeIs(1));
  EXPECT_FALSE(cluster.coordinator().waiting());
}

// Two ranks go on without the third, and one of them joins before it has received the plan.
TEST(Join, AJoinThatCannotEndMakesNoRankAbsent) {
  Cluster cluster(3);
  wire::Request set = unnamed(OpKind::kAddProcessSet, 0, {0});
  set.new_set = {1, 2};
  cluster.submit_everywhere(set);
  cluster.exchange();
  cluster.rank(0).request_shutdown();
  cluster.exchange();
  wire::Request without = allreduce("without");
  without.process_set = 1;
  cluster.submit(2, without);
  cluster.submit(1, join_request());
  const auto applied = cluster.exchange();
  ASSERT_THAT(applied[1].errors, SizeIs(1));
  EXPECT_THAT(applied[1].errors[0].message, HasSubstr("rank 0 (host0) has called shutdown()"));
  EXPECT_THAT(applied[2].errors, IsEmpty());
  EXPECT_THAT(applied[2].batches, IsEmpty());
  cluster.submit(1, without);
  const auto later = cluster.exchange();
  ASSERT_THAT(later[2].batches, SizeIs(1));
  EXPECT_THAT(later[2].batches[0].absent, IsEmpty());
}

TEST(Join, ARankThatSubmitsMoreIsBroken) {
  Cluster cluster(2);
  cluster.submit(1, join_request());
  cluster.report(1);
  cluster.submit(1, allreduce("a"));
  EXPECT_THROW(cluster.report(1), Error);
}

}  // namespace
}  // namespace hvd::control
