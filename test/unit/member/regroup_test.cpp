#include "member/regroup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace hvd::member {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

StateSummary whole(Commit commit, std::uint64_t hash = 1) {
  return {.commit = commit, .kind = StateKind::kWhole, .hash = hash};
}

StateSummary touched(Commit commit) {
  return {.commit = commit, .kind = StateKind::kTouched, .hash = 99};
}

Entrant entrant(WorkerId worker, const std::string& host, std::uint64_t serial,
                StateSummary state = {}) {
  return {.worker = worker, .host = host, .serial = serial, .state = state};
}

std::vector<WorkerId> workers(const Assign& assign) {
  std::vector<WorkerId> ids;
  for (const Seat& seat : assign.seats) ids.push_back(seat.worker);
  return ids;
}

std::vector<WorkerId> receivers(const Assign& assign) {
  std::vector<WorkerId> ids;
  for (const Seat& seat : assign.seats)
    if (seat.receives) ids.push_back(seat.worker);
  return ids;
}

TEST(Regroup, HostsAreContiguousAndTheLongestServingRankIsFirst) {
  const auto next =
      regroup(2,
              {entrant(10, "a", 5, whole(3)), entrant(11, "b", 2, whole(3)), entrant(12, "a", 6),
               entrant(13, "c", 4, whole(3)), entrant(14, "b", 7)},
              false);
  ASSERT_TRUE(next);
  EXPECT_THAT(workers(next->assign), ElementsAre(11, 14, 13, 10, 12));
  EXPECT_EQ(next->assign.generation, 2u);
}

TEST(Regroup, TheHighestCommitIsKeptAndOnlyThoseBehindReceive) {
  const auto next = regroup(2,
                            {entrant(1, "a", 1, whole(3)), entrant(2, "a", 2, whole(4)),
                             entrant(3, "a", 3, whole(4)), entrant(4, "a", 4)},
                            false);
  ASSERT_TRUE(next);
  EXPECT_EQ(next->assign.root, 1u);
  EXPECT_EQ(next->assign.state, whole(4));
  EXPECT_THAT(receivers(next->assign), ElementsAre(1, 4));
  EXPECT_FALSE(next->touched);
  EXPECT_FALSE(next->assign.load);
  EXPECT_THAT(next->differed, IsEmpty());
}

TEST(Regroup, AWholeStateIsPreferredToWrittenParametersOfTheSameCommit) {
  const auto next =
      regroup(2, {entrant(1, "a", 1, touched(3)), entrant(2, "a", 2, whole(3))}, false);
  ASSERT_TRUE(next);
  EXPECT_EQ(next->assign.root, 1u);
  EXPECT_THAT(receivers(next->assign), ElementsAre(1));
}

TEST(Regroup, WhereAllHaveWrittenOneStateGoesToAll) {
  const auto next =
      regroup(2, {entrant(1, "a", 1, touched(3)), entrant(2, "a", 2, touched(3))}, false);
  ASSERT_TRUE(next);
  EXPECT_TRUE(next->touched);
  EXPECT_EQ(next->assign.root, 0u);
  EXPECT_THAT(receivers(next->assign), ElementsAre(2))
      << "equal hashes of partial states prove little";
}

TEST(Regroup, ACommitIsNotUndoneForTheSakeOfAWholeState) {
  const auto next =
      regroup(2, {entrant(1, "a", 1, whole(3)), entrant(2, "a", 2, touched(4))}, false);
  ASSERT_TRUE(next);
  EXPECT_EQ(next->assign.root, 1u);
  EXPECT_TRUE(next->touched);
}

TEST(Regroup, AStateThatDiffersFromMostIsReplacedAndNamed) {
  const auto next = regroup(2,
                            {entrant(1, "a", 1, whole(3, 7)), entrant(2, "a", 2, whole(3, 8)),
                             entrant(3, "a", 3, whole(3, 8))},
                            false);
  ASSERT_TRUE(next);
  EXPECT_EQ(next->assign.root, 1u);
  EXPECT_THAT(receivers(next->assign), ElementsAre(1));
  EXPECT_THAT(next->differed, ElementsAre(1));
}

TEST(Regroup, WithoutAStateRankZeroMakesOne) {
  std::vector<Entrant> entrants{entrant(1, "a", 1), entrant(2, "a", 2)};
  const auto first = regroup(1, entrants, true);
  ASSERT_TRUE(first);
  EXPECT_TRUE(first->assign.load);
  EXPECT_EQ(first->assign.root, 0u);
  EXPECT_THAT(receivers(first->assign), ElementsAre(2));
  EXPECT_FALSE(regroup(5, entrants, false)) << "its program cannot load one";
  entrants[0].can_load = true;
  EXPECT_TRUE(regroup(5, entrants, false));
}

}  // namespace
}  // namespace hvd::member
