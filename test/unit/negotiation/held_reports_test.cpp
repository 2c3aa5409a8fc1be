#include "negotiation/aggregator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TimePoint in_second(int second) { return TimePoint(seconds(second)); }

RankSet apart(int a, int b) {
  RankSet ranks(a);
  ranks.add(RankSet(b));
  return ranks;
}

class HeldReportsTest : public ::testing::Test {
 protected:
  bool hit(int rank, const std::vector<std::uint32_t>& slots, std::uint64_t number = 1,
           int second = 0) {
    return held_.add_hits(wire::SlotSet(slots), RankSet(rank), number, 0, in_second(second),
                          members_);
  }
  bool ask(int rank, const wire::Request& request, wire::Stamp stamp = 1, int second = 0) {
    HeldReports::Variant variant{RankSet(rank), std::nullopt, {stamp, request, {}}};
    if (wire::gathers(request.kind)) variant.asked.first_dims = {{request.shape[0], 1}};
    return held_.add_named(request.name, request.process_set, std::move(variant), in_second(second),
                           members_);
  }
  wire::Report::Section complete() {
    wire::Report::Section section;
    held_.move_complete(section, members_);
    return section;
  }

  ProcessSetTable sets_{8};
  SubtreeMembers members_{RankSet(4, 6), sets_};
  HeldReports held_;
};

TEST_F(HeldReportsTest, WhatAllBelowHaveHitGoesOnAsOneEntry) {
  EXPECT_FALSE(hit(5, {0, 3}, 7));
  EXPECT_FALSE(hit(6, {0, 3}, 8));
  EXPECT_THAT(complete().groups, IsEmpty());
  EXPECT_TRUE(hit(4, {0, 3}, 9));
  const auto section = complete();
  ASSERT_EQ(section.groups.size(), 1U);
  EXPECT_EQ(section.groups[0].ranks, RankSet(4, 6));
  // The number is that of the lowest rank.
  EXPECT_THAT(section.groups[0].hits, ElementsAre(wire::StampedHits{9, wire::SlotSet({0, 3})}));
  EXPECT_TRUE(held_.empty());
}

TEST_F(HeldReportsTest, AReportOfSomeSlotsSplitsThem) {
  hit(4, {0, 1, 2});
  hit(5, {1, 2, 5});
  EXPECT_TRUE(hit(6, {2}));
  const auto section = complete();
  ASSERT_EQ(section.groups.size(), 1U);
  EXPECT_EQ(section.groups[0].hits[0].slots, wire::SlotSet({2}));
  EXPECT_FALSE(held_.empty());
  EXPECT_TRUE(hit(6, {1}));
  EXPECT_EQ(complete().groups[0].hits[0].slots, wire::SlotSet({1}));
}

TEST_F(HeldReportsTest, WhatIsAskedForAlikeIsOneRequestWithTheFirstDimensionsRankByRank) {
  ask(6, allgather("g", {3, 2}), 8);
  ask(4, allgather("g", {3, 2}), 5);
  EXPECT_TRUE(ask(5, allgather("g", {1, 2}), 7));
  const auto section = complete();
  ASSERT_EQ(section.groups.size(), 1U);
  EXPECT_EQ(section.groups[0].ranks, RankSet(4, 6));
  ASSERT_EQ(section.groups[0].requests.size(), 1U);
  const wire::StampedRequest& asked = section.groups[0].requests[0];
  EXPECT_EQ(asked.stamp, 5U);
  EXPECT_EQ(asked.request, allgather("g", {3, 2}));
  EXPECT_THAT(asked.first_dims,
              ElementsAre(wire::DimRun{3, 1}, wire::DimRun{1, 1}, wire::DimRun{3, 1}));
}

TEST_F(HeldReportsTest, RanksThatAskDifferentlyGoOnTogetherEachWithItsOwn) {
  ask(4, allreduce("a", {4}));
  ask(5, allreduce("a", {5}));
  EXPECT_TRUE(ask(6, allreduce("a", {4})));
  const auto section = complete();
  ASSERT_EQ(section.groups.size(), 2U);
  EXPECT_EQ(section.groups[0].ranks, apart(4, 6));
  EXPECT_EQ(section.groups[1].ranks, RankSet(5));
}

TEST_F(HeldReportsTest, WhatGoesOnInPartsIsTold) {
  hit(4, {1});
  for (const int rank : {4, 5, 6}) hit(rank, {2});
  ask(5, allreduce("a"));
  for (const int rank : {4, 5, 6}) ask(rank, allreduce("b"));
  HeldReports copy = held_;
  wire::Report::Section section;
  const auto in_parts = held_.move_all(section, &members_);
  EXPECT_EQ(in_parts.slots, wire::SlotSet({1}));
  EXPECT_THAT(in_parts.keys, ElementsAre("a"));
  EXPECT_TRUE(held_.empty());
  wire::Report::Section of_another_epoch;
  const auto all = copy.move_all(of_another_epoch, nullptr);
  EXPECT_EQ(all.slots, wire::SlotSet({1, 2}));
  EXPECT_THAT(all.keys, ElementsAre("a", "b"));
  EXPECT_EQ(section, of_another_epoch);
}

TEST_F(HeldReportsTest, WhatIsLeftIsFoundByItsNameAgain) {
  ask(4, allreduce("first"));
  for (const int rank : {4, 5, 6}) ask(rank, allreduce("second"));
  ask(4, allreduce("third"));
  EXPECT_EQ(complete().groups[0].requests[0].request.name, "second");
  ask(5, allreduce("third"));
  EXPECT_TRUE(ask(6, allreduce("third")));
  EXPECT_EQ(complete().groups[0].requests[0].request.name, "third");
}

TEST_F(HeldReportsTest, TheOldestIsWhatWasFirstAskedFor) {
  EXPECT_FALSE(held_.oldest());
  hit(4, {0}, 1, 9);
  ask(4, allreduce("a"), 1, 7);
  ask(5, allreduce("a"), 1, 8);
  EXPECT_EQ(held_.oldest(), in_second(7));
}

TEST_F(HeldReportsTest, OnlyMembersOfTheSetAreExpected) {
  const int set = sets_.add({1, 4, 6});
  EXPECT_TRUE(members_.complete(apart(4, 6), set));
  EXPECT_FALSE(members_.complete(RankSet(4), set));
  EXPECT_TRUE(members_.complete(RankSet(4, 6), 0));
  EXPECT_FALSE(members_.complete(apart(4, 6), 0));
  sets_.remove(set);
  members_.forget_sets();
  EXPECT_TRUE(members_.complete(RankSet(4), set)) << "never wait for a removed set";
}

}  // namespace
}  // namespace hvd::control
