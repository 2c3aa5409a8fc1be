// Sets of ranks that come and go.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

wire::Request add(std::uint64_t ordinal, std::vector<int> ranks) {
  wire::Request request = unnamed(OpKind::kAddProcessSet, ordinal, {0});
  request.new_set = std::move(ranks);
  return request;
}

wire::Request remove(std::uint64_t ordinal, int process_set) {
  wire::Request request = unnamed(OpKind::kRemoveProcessSet, ordinal, {0});
  request.removed_set = process_set;
  return request;
}

wire::Request of_set(wire::Request request, int process_set) {
  request.process_set = process_set;
  return request;
}

TEST(ProcessSetTable, NumbersAreNotUsedAgain) {
  ProcessSetTable table(4);
  EXPECT_EQ(table.add({1, 3}), 1);
  EXPECT_EQ(table.add({1, 3}), 2);
  EXPECT_EQ(table.position(1, 3), 1);
  EXPECT_EQ(table.position(1, 0), -1);
  table.remove(2);
  EXPECT_TRUE(table.was_removed(2));
  EXPECT_FALSE(table.was_removed(3));
  EXPECT_FALSE(table.was_removed(0));
  EXPECT_EQ(table.add({0}), 3);
}

TEST(ProcessSets, AnOperationOfASetNeedsItsMembersOnly) {
  Cluster cluster(3);
  cluster.submit_everywhere(add(0, {0, 2}));
  for (const Applied& applied : cluster.exchange()) EXPECT_EQ(applied.batches.at(0).result, 1);
  cluster.submit(0, of_set(allreduce("a"), 1));
  cluster.submit(2, of_set(allreduce("a"), 1));
  const auto applied = cluster.exchange();
  EXPECT_THAT(*applied[0].batches.at(0).members, ElementsAre(0, 2));
  EXPECT_THAT(applied[1].batches, IsEmpty());
}

TEST(ProcessSets, RanksThatSubmitDifferentSetsGetAnError) {
  Cluster cluster(2);
  cluster.submit(0, add(0, {0}));
  cluster.submit(1, add(0, {0, 1}));
  const auto applied = cluster.exchange();
  EXPECT_THAT(applied[0].errors.at(0).message,
              HasSubstr("list of ranks differs: rank 0 [0], rank 1 [0,1]"));
  EXPECT_THAT(applied[1].errors, SizeIs(1));
}

TEST(ProcessSets, WaitingOperationsOfARemovedSetEndOnEachRank) {
  Cluster cluster(2);
  cluster.submit_everywhere(add(0, {0, 1}));
  cluster.exchange();
  cluster.submit(0, of_set(allreduce("a"), 1));
  cluster.report(0);
  cluster.submit_everywhere(remove(0, 1));
  cluster.report_all();
  // Submitted, but this rank has not applied the removal yet.
  cluster.submit(1, of_set(allreduce("b"), 1));
  const wire::Bytes crossing = cluster.send(1);
  ASSERT_TRUE(cluster.decide());
  cluster.arrive(crossing);
  EXPECT_FALSE(cluster.coordinator().waiting());
  const auto applied = cluster.apply_everywhere();
  ASSERT_THAT(applied[0].errors, SizeIs(1));
  EXPECT_EQ(applied[0].errors[0].name, "a");
  EXPECT_EQ(applied[0].errors[0].code, StatusCode::kUsage);
  ASSERT_THAT(applied[1].errors, SizeIs(1));
  EXPECT_EQ(applied[1].errors[0].name, "b");
  EXPECT_THAT(applied[1].sets_removed, ElementsAre(1));
  EXPECT_EQ(cluster.rank(0).awaiting(), 0u);
  EXPECT_EQ(cluster.rank(1).awaiting(), 0u);
}

TEST(ProcessSets, ReadyOperationsRunBeforeTheSetEnds) {
  Cluster cluster(2);
  cluster.submit_everywhere(add(0, {0, 1}));
  cluster.exchange();
  cluster.submit_everywhere(remove(0, 1));
  cluster.submit_everywhere(of_set(allreduce("a"), 1));
  const auto applied = cluster.exchange();
  ASSERT_THAT(applied[0].batches, SizeIs(2));
  EXPECT_EQ(applied[0].batches[0].operations.at(0).request.name, "a");
  EXPECT_THAT(applied[0].errors, IsEmpty());
}

TEST(ProcessSets, RemovingTwiceIsAMismatchTheSecondTime) {
  Cluster cluster(2);
  cluster.submit_everywhere(add(0, {0, 1}));
  cluster.exchange();
  cluster.submit_everywhere(remove(0, 1));
  cluster.submit_everywhere(remove(1, 1));
  const auto applied = cluster.exchange();
  EXPECT_THAT(applied[0].batches, SizeIs(1));
  EXPECT_THAT(applied[0].errors.at(0).message, HasSubstr("there is no process set 1"));
}

TEST(ProcessSets, AHitOfARemovedSetIsNoOffence) {
  Cluster cluster(2);
  cluster.submit_everywhere(add(0, {0, 1}));
  cluster.exchange();
  cluster.submit_everywhere(of_set(allreduce("a"), 1));
  cluster.exchange();
  cluster.submit_everywhere(remove(0, 1));
  cluster.report_all();
  cluster.submit(1, of_set(allreduce("a"), 1));
  const wire::Bytes crossing = cluster.send(1);
  ASSERT_TRUE(cluster.decide());
  EXPECT_NO_THROW(cluster.arrive(crossing));
  EXPECT_THAT(cluster.apply_everywhere()[1].errors, SizeIs(1));
}

}  // namespace
}  // namespace hvd::control
