#include "negotiation/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "hvd/error.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

CoordinatorOptions with_capacity(std::size_t capacity) {
  CoordinatorOptions options;
  options.cache_capacity = capacity;
  return options;
}

std::vector<std::string> names(const wire::Plan& plan) {
  std::vector<std::string> found;
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) {
      const auto* const cached = std::get_if<wire::SlotUse>(&tensor);
      found.push_back(cached != nullptr ? numbered("#", cached->slot)
                                        : std::get<wire::Response>(tensor).request.name);
    }
  }
  return found;
}

TEST(Coordinator, DecidesOnceTheLastHasSubmitted) {
  Cluster cluster(3);
  cluster.submit_everywhere(allreduce("a"));
  cluster.report(2);
  cluster.report(0);
  EXPECT_FALSE(cluster.decide());
  EXPECT_TRUE(cluster.coordinator().waiting());
  cluster.report(1);
  const auto plan = cluster.decide();
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->sequence, 1u);
  EXPECT_THAT(names(*plan), ElementsAre("a"));
  EXPECT_FALSE(cluster.decide());
  EXPECT_FALSE(cluster.coordinator().waiting());
}

TEST(Coordinator, TheSameReportsInAnyInterleavingGiveTheSamePlan) {
  std::mt19937_64 random(1);
  wire::Bytes first;
  for (int round = 0; round < 50; ++round) {
    Cluster cluster(4);
    for (int rank = 0; rank < 4; ++rank) {
      for (int i = 0; i < 6; ++i)
        cluster.submit(rank,
                       allreduce(numbered("t", static_cast<std::uint64_t>((i * 5 + rank) % 6)),
                                 {i % 3 == 0 ? 9 : 4}));
      cluster.submit(rank, allgather("g", {rank, 2}));
    }
    std::vector<int> ranks = {0, 1, 2, 3};
    std::shuffle(ranks.begin(), ranks.end(), random);
    for (const int rank : ranks) cluster.report(rank);
    const auto plan = cluster.decide();
    ASSERT_TRUE(plan);
    if (round == 0) first = wire::encode(*plan);
    EXPECT_EQ(wire::encode(*plan), first) << "round " << round;
  }
}

TEST(Coordinator, AMismatchFailsOnAllRanksAndTheJobGoesOn) {
  Cluster cluster(4);
  for (int rank = 0; rank < 4; ++rank)
    cluster.submit(rank, allreduce("fc1.weight", {128, rank == 3 ? 32 : 64}));
  cluster.submit_everywhere(allreduce("fine"));
  for (const Applied& applied : cluster.exchange()) {
    EXPECT_EQ(error_of(applied, "fc1.weight"),
              "allreduce 'fc1.weight': shape differs: rank 0 [128,64], rank 3 [128,32]; every rank "
              "must submit the same shape");
    EXPECT_EQ(applied.errors.at(0).code, StatusCode::kMismatch);
    EXPECT_THAT(applied.batches, SizeIs(1));
  }
  cluster.submit_everywhere(allreduce("fc1.weight", {128, 64}));
  for (const Applied& applied : cluster.exchange()) EXPECT_THAT(applied.batches, SizeIs(1));
}

TEST(Coordinator, AMismatchAgainstTheCacheIsFound) {
  Cluster cluster(2);
  cluster.submit_everywhere(allreduce("a"));
  cluster.exchange();
  cluster.submit(0, allreduce("a"));
  cluster.submit(1, allreduce("a", {5}));
  for (const Applied& applied : cluster.exchange())
    EXPECT_THAT(error_of(applied, "a"), HasSubstr("rank 0 [4], rank 1 [5]"));
}

TEST(Coordinator, ASecondUseGoesBySlot) {
  Cluster cluster(2);
  for (int step = 0; step < 3; ++step) {
    cluster.submit_everywhere(allreduce("a"));
    cluster.submit_everywhere(allgather("g", {2}));
    cluster.report_all();
    const auto plan = cluster.decide();
    EXPECT_THAT(names(*plan), step == 0 ? ElementsAre("a", "g") : ElementsAre("#0", "#1"));
    for (const Applied& applied : cluster.apply_everywhere()) {
      EXPECT_EQ(applied.batches.at(1).operations.at(0).request, allgather("g", {2}));
    }
  }
  EXPECT_EQ(cluster.rank(1).reported_by_bit(), 4u);
}

TEST(Coordinator, WithoutACacheEverythingGoesInFull) {
  Cluster cluster(2, with_capacity(0));
  for (int step = 0; step < 3; ++step) {
    cluster.submit_everywhere(allreduce("a"));
    cluster.report_all();
    EXPECT_THAT(names(*cluster.decide()), ElementsAre("a"));
    cluster.apply_everywhere();
  }
  EXPECT_EQ(cluster.rank(0).reported_by_bit(), 0u);
}

TEST(Coordinator, AnAllgatherWhoseSizesChangeIsPlannedWithTheNewOnes) {
  Cluster cluster(3);
  for (std::int64_t step = 0; step < 4; ++step) {
    for (int rank = 0; rank < 3; ++rank)
      cluster.submit(rank, allgather("g", {rank == 1 ? step / 2 : rank, 2}));
    for (const Applied& applied : cluster.exchange()) {
      EXPECT_THAT(applied.batches.at(0).operations.at(0).first_dims, ElementsAre(0, step / 2, 2));
    }
  }
  EXPECT_EQ(cluster.rank(0).reported_by_bit(), 3u);
  EXPECT_EQ(cluster.rank(1).reported_by_bit(), 2u);
}

TEST(Coordinator, UnnamedOperationsMeetByOrdinalAndAreCached) {
  Cluster cluster(2);
  cluster.submit(0, unnamed(OpKind::kAllreduce, 0));
  cluster.submit(0, unnamed(OpKind::kAllreduce, 1));
  cluster.submit(1, unnamed(OpKind::kAllreduce, 0));
  cluster.report_all();
  EXPECT_THAT(names(*cluster.decide()), ElementsAre("allreduce.unnamed.0"));
  cluster.apply_everywhere();
  cluster.submit(1, unnamed(OpKind::kAllreduce, 1));
  cluster.submit_everywhere(unnamed(OpKind::kAllreduce, 2));
  cluster.report_all();
  const auto plan = cluster.decide();
  EXPECT_THAT(names(*plan), ElementsAre("#0", "#0"));
  EXPECT_EQ(std::get<wire::SlotUse>(plan->batches.at(0).tensors.at(0)).ordinal, 1u);
  EXPECT_EQ(std::get<wire::SlotUse>(plan->batches.at(0).tensors.at(1)).ordinal, 2u);
  for (const Applied& applied : cluster.apply_everywhere()) {
    EXPECT_EQ(applied.batches.at(0).operations.at(1).request, unnamed(OpKind::kAllreduce, 2));
  }
}

// Rank 1 hits slot 0, which holds 'a' for it, while a plan that it has not received puts 'b' there.
TEST(Coordinator, AHitSentBeforeAnEvictionIsReadAsItWasMeant) {
  Cluster cluster(2, with_capacity(1));
  cluster.submit_everywhere(allreduce("a"));
  cluster.exchange();
  cluster.submit(1, allreduce("b"));
  cluster.report(1);
  cluster.submit(1, allreduce("a"));
  const wire::Bytes hit = cluster.send(1);
  EXPECT_THAT(rank_report(std::get<wire::Report>(wire::decode(hit))).cached, ElementsAre(0));
  cluster.submit(0, allreduce("b"));
  cluster.report(0);
  EXPECT_THAT(names(*cluster.decide()), ElementsAre("b"));
  EXPECT_EQ(cluster.coordinator().displaced_entries(), 1u);
  cluster.arrive(hit);
  cluster.apply(0);
  cluster.submit(0, allreduce("a"));
  cluster.report(0);
  EXPECT_THAT(names(*cluster.decide()), ElementsAre("a"));
  cluster.apply(1);
  EXPECT_EQ(cluster.apply(1).batches.at(0).operations.at(0).request, allreduce("a"));
  cluster.apply(0);
  // Both have now applied the plans that displaced the entries, as their next reports state.
  cluster.submit_everywhere(allreduce("a"));
  cluster.report_all();
  EXPECT_EQ(cluster.coordinator().displaced_entries(), 0u);
  EXPECT_THAT(names(*cluster.decide()), ElementsAre("#0"));
}

TEST(Coordinator, AHitAfterAnEvictionIsNotCountedForTheTensorThatWasThere) {
  Cluster cluster(3, with_capacity(1));
  cluster.submit_everywhere(allreduce("a"));
  cluster.exchange();
  cluster.submit(1, allreduce("a"));
  cluster.report(1);
  cluster.submit_everywhere(allreduce("b"));
  cluster.exchange();
  cluster.submit(0, allreduce("a"));
  cluster.submit(2, allreduce("b"));  // hits slot 0, as rank 1's 'a' did
  cluster.report_all();
  EXPECT_FALSE(cluster.decide());
  cluster.submit(2, allreduce("a"));
  cluster.report(2);
  EXPECT_THAT(names(*cluster.decide()), ElementsAre("a"));
}

// Unnamed operations that are alike share a slot, so a rank may hit the slot for one of them while
// the plan for another replaces its content.
TEST(Coordinator, AHitSentBeforeAReplacementIsReadAsItWasMeant) {
  Cluster cluster(2);
  cluster.submit_everywhere(unnamed(OpKind::kAllgather, 0, {1}));
  cluster.exchange();
  cluster.submit(1, unnamed(OpKind::kAllgather, 1, {7}));
  cluster.report(1);
  cluster.submit(1, unnamed(OpKind::kAllgather, 2, {1}));
  const wire::Bytes hit = cluster.send(1);
  EXPECT_THAT(rank_report(std::get<wire::Report>(wire::decode(hit))).cached_unnamed,
              ElementsAre(wire::SlotUse{0, 2}));
  cluster.submit(0, unnamed(OpKind::kAllgather, 1, {1}));
  cluster.report(0);
  EXPECT_THAT(std::get<wire::Response>(cluster.decide()->batches.at(0).tensors.at(0)).first_dims,
              ElementsAre(1, 7));
  cluster.apply(0);
  cluster.submit(0, unnamed(OpKind::kAllgather, 2, {1}));
  cluster.report(0);
  cluster.arrive(hit);
  EXPECT_THAT(std::get<wire::Response>(cluster.decide()->batches.at(0).tensors.at(0)).first_dims,
              ElementsAre(1, 1));
  cluster.apply(1);
  EXPECT_EQ(cluster.apply(1).batches.at(0).operations.at(0).request,
            unnamed(OpKind::kAllgather, 2, {1}));
}

TEST(Coordinator, AcknowledgementsBoundTheHistoryOfSlots) {
  Cluster cluster(3, with_capacity(2));
  std::size_t most = 0;
  for (int step = 0; step < 200; ++step) {
    for (int i = 0; i < 3; ++i)
      cluster.submit_everywhere(
          allreduce(numbered("t", static_cast<std::uint64_t>((step + i) % 7))));
    cluster.exchange();
    most = std::max(most, cluster.coordinator().displaced_entries());
  }
  EXPECT_LE(most, 6u);
  EXPECT_GT(most, 0u);
}

TEST(Coordinator, AGroupRunsTogetherOrNotAtAll) {
  Cluster cluster(2);
  cluster.submit_everywhere(in_group(allreduce("a"), "g", 2, 0));
  EXPECT_THAT(cluster.exchange()[0].batches, IsEmpty());
  cluster.submit_everywhere(in_group(allreduce("b"), "g", 2, 1));
  EXPECT_THAT(cluster.exchange()[0].batches.at(0).operations, SizeIs(2));
}

TEST(Coordinator, AMismatchInOneMemberFailsTheGroup) {
  for (const int bad : {0, 1, 2}) {
    Cluster cluster(2);
    for (int rank = 0; rank < 2; ++rank) {
      for (int i = 0; i < 3; ++i) {
        cluster.submit(rank, in_group(allreduce(numbered("m", static_cast<std::uint64_t>(i)),
                                                {i == bad && rank == 1 ? 9 : 4}),
                                      "g", 3, i));
      }
    }
    for (const Applied& applied : cluster.exchange()) {
      EXPECT_THAT(applied.batches, IsEmpty());
      ASSERT_THAT(applied.errors, SizeIs(3));
      for (const auto& error : applied.errors) {
        EXPECT_EQ(error.code, StatusCode::kMismatch);
        EXPECT_THAT(error.message, HasSubstr("allreduce 'm" + std::to_string(bad) +
                                             "': shape differs: rank 0 [4], rank 1 [9]"));
      }
    }
    EXPECT_FALSE(cluster.coordinator().waiting());
  }
}

TEST(Coordinator, SmallTensorsAreHeldBackWhileTwoBatchesAreUnderWay) {
  CoordinatorOptions options;
  options.fusion_threshold = 100;
  Cluster cluster(2, options);
  cluster.submit_everywhere(allreduce("a"));
  cluster.report_all();
  EXPECT_FALSE(cluster.decide(2));
  cluster.submit_everywhere(allreduce("b", {25}));
  cluster.report_all();
  const auto full = cluster.decide(2);  // a whole batch has gathered
  ASSERT_TRUE(full);
  EXPECT_THAT(names(*full), ElementsAre("a", "b"));
  cluster.apply_everywhere();
  cluster.submit_everywhere(allreduce("c"));
  cluster.report_all();
  EXPECT_FALSE(cluster.decide(3));
  EXPECT_TRUE(cluster.decide(1));
}

TEST(Coordinator, OperationsThatShareNoBatchAreNotHeldBack) {
  wire::Request alone = allreduce("alone"), adasum = allreduce("adasum");
  alone.alone = true;
  adasum.op = ReduceOp::kAdasum;
  for (const wire::Request& request : {alone, adasum, unnamed(OpKind::kBarrier, 0, {})}) {
    Cluster cluster(2);
    cluster.submit_everywhere(allreduce("small"));
    cluster.submit_everywhere(request);
    cluster.report_all();
    const auto plan = cluster.decide(2);
    ASSERT_TRUE(plan) << request.name;
    EXPECT_THAT(names(*plan), ElementsAre(request.name));
    cluster.apply_everywhere();
    EXPECT_FALSE(cluster.decide(2));
    EXPECT_THAT(names(*cluster.decide(1)), ElementsAre("small"));
  }
}

TEST(Coordinator, OperationsThatCannotRunAreNotHeldBack) {
  Cluster cluster(2);
  cluster.submit(0, allreduce("a", {4}));
  cluster.submit(1, allreduce("a", {5}));
  cluster.report_all();
  const auto plan = cluster.decide(2);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->errors.size(), 1U);
}

TEST(Coordinator, ABusySetHoldsBackItsOwnTensorsOnly) {
  Cluster cluster(4);
  wire::Request add = unnamed(OpKind::kAddProcessSet, 0, {});
  add.new_set = {2, 3};
  cluster.submit_everywhere(add);
  cluster.exchange();
  wire::Request of_pair = allreduce("pair");
  of_pair.process_set = 1;
  for (const int rank : {2, 3}) cluster.submit(rank, of_pair);
  cluster.submit_everywhere(allreduce("world"));
  cluster.report_all();
  const auto world_is_busy = [](int process_set, DeviceType) -> std::size_t {
    return process_set == 0 ? 2 : 0;
  };
  const auto plan = cluster.coordinator().decide({}, world_is_busy);
  ASSERT_TRUE(plan);
  EXPECT_THAT(names(*plan), ElementsAre("pair"));
  EXPECT_THAT(names(*cluster.decide(1)), ElementsAre("world"));
}

// Tensors that still gather could not run after these operations, because they need the joined
// ranks or the removed set.
TEST(Coordinator, NothingGathersAcrossAJoinOrTheEndOfASet) {
  wire::Request join = unnamed(OpKind::kJoin, 0, {0});
  join.dtype = DataType::kUInt8;
  Cluster joining(2);
  joining.submit(1, join);
  joining.report_all();
  joining.submit(0, allreduce("a"));
  joining.report_all();
  EXPECT_FALSE(joining.decide(2));
  joining.submit(0, join);
  joining.report_all();
  EXPECT_EQ(joining.decide(2)->batches.size(), 2U);
  joining.apply_everywhere();

  Cluster ending(2);
  wire::Request add = unnamed(OpKind::kAddProcessSet, 0, {});
  add.new_set = {0, 1};
  ending.submit_everywhere(add);
  ending.exchange();
  wire::Request of_set = allreduce("a"), remove = unnamed(OpKind::kRemoveProcessSet, 0, {});
  of_set.process_set = remove.removed_set = 1;
  ending.submit_everywhere(of_set);
  ending.report_all();
  EXPECT_FALSE(ending.decide(2));
  ending.submit_everywhere(remove);
  ending.report_all();
  EXPECT_EQ(ending.decide(2)->batches.size(), 2U);
  for (const Applied& applied : ending.apply_everywhere()) EXPECT_TRUE(applied.errors.empty());
}

TEST(Coordinator, WithoutFusionNothingIsHeldBack) {
  CoordinatorOptions options;
  options.fusion_threshold = 0;
  Cluster cluster(2, options);
  cluster.submit_everywhere(allreduce("a", {0}));
  cluster.report_all();
  EXPECT_TRUE(cluster.decide(9));
}

TEST(Coordinator, HeldOperationsRunBeforeTheShutdown) {
  Cluster cluster(2);
  cluster.submit_everywhere(allreduce("a"));
  for (int rank = 0; rank < 2; ++rank) cluster.rank(rank).request_shutdown();
  cluster.report_all();
  EXPECT_FALSE(cluster.decide(2));
  const auto plan = cluster.decide(1);
  EXPECT_THAT(names(*plan), ElementsAre("a"));
  EXPECT_TRUE(plan->shutdown);
}

TEST(Coordinator, RefusesReportsThatCannotBe) {
  Cluster cluster(2);
  cluster.submit_everywhere(allreduce("a"));
  cluster.exchange();
  const auto accept = [&](const RankReport& report) {
    cluster.coordinator().accept(make_report(report), {});
  };
  EXPECT_THROW(accept({.rank = 2}), Error);
  EXPECT_THROW(accept({.rank = 0, .last_applied = 2}), Error);
  EXPECT_THROW(accept({.rank = 0, .last_applied = 1, .cached = {5}}), Error);
  accept({.rank = 0, .last_applied = 1, .cached = {0}});
  EXPECT_THROW(accept({.rank = 0, .last_applied = 1, .cached = {0}}), Error);
  EXPECT_THROW(accept({.rank = 0, .last_applied = 0}), Error);
}

}  // namespace
}  // namespace hvd::control
