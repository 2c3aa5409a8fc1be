#include "negotiation/aggregator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;

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
    return held_.add_named(request.name, request.process_set, std::move(variant), in_second(second),
                           members_);
  }

  ProcessSetTable sets_{8};
  SubtreeMembers members_{RankSet(4, 6), sets_};
  HeldReports held_;
};

TEST_F(HeldReportsTest, OperationsForwardedInPartsAreReturned) {
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

TEST_F(HeldReportsTest, TheOldestIsTheFirstRequested) {
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
