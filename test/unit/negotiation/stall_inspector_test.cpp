#include "negotiation/stall_inspector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/negotiation/cluster.h"
#include "unit/negotiation/table_by_rank.h"

namespace hvd::control {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TimePoint at(int second) { return TimePoint(seconds(second)); }

class StallInspectorTest : public ::testing::Test {
 protected:
  void ask(int rank, wire::Request request, int second) {
    stalls_.record_activity(rank, request.name, at(second));
    table_.add(rank, std::move(request), std::nullopt, at(second));
  }

  ProcessSetTable sets_{3};
  TableByRank table_{sets_, 3};
  StallInspector stalls_{{seconds(30), seconds(600)}, {"alpha", "beta", "gamma"}};
};

TEST_F(StallInspectorTest, ReportsMissingRanksAndTheirOperationsOnce) {
  ask(0, allreduce("fc1.weight"), 10);
  ask(1, allreduce("conv1.bias"), 11);
  EXPECT_THAT(stalls_.warnings(table_, at(39)), IsEmpty());
  EXPECT_THAT(
      stalls_.warnings(table_, at(40)),
      ElementsAre("allreduce 'fc1.weight' has waited 30.0 s for 2 of 3 ranks: "
                  "rank 1 (beta) last submitted 'conv1.bias' 29.0 s ago and waits for "
                  "allreduce 'conv1.bias'; "
                  "rank 2 (gamma) has submitted no operation yet and does not wait for hvd"));
  EXPECT_THAT(stalls_.warnings(table_, at(40)), IsEmpty());
  EXPECT_THAT(stalls_.warnings(table_, at(500)),
              ElementsAre(HasSubstr("'conv1.bias' has waited 489.0 s for 2 of 3 ranks")));
}

TEST_F(StallInspectorTest, TheErrorGivesTheRemedyWhenTheTimeIsUp) {
  ask(0, allreduce("a"), 0);
  ask(1, allreduce("a"), 7);
  EXPECT_THAT(stalls_.expired(table_, at(599)), IsEmpty());
  const auto expired = stalls_.expired(table_, at(600));
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(
      stalls_.error_text(table_, *expired.front(), at(600)),
      "allreduce 'a': not submitted by every rank within 600.0 s (stall_shutdown); missing: "
      "rank 2 (gamma) has submitted no operation yet and does not wait for hvd; every rank of "
      "the process set must submit the same operations");
}

TEST_F(StallInspectorTest, ACompleteOperationDoesNotWait) {
  for (int rank = 0; rank < 3; ++rank) ask(rank, allreduce("a"), 0);
  EXPECT_THAT(stalls_.warnings(table_, at(1000)), IsEmpty());
  EXPECT_THAT(stalls_.expired(table_, at(1000)), IsEmpty());
  EXPECT_FALSE(stalls_.next_deadline(table_));
}

TEST_F(StallInspectorTest, AMemberThatWaitsForTheRestOfItsGroupCounts) {
  for (int rank = 0; rank < 3; ++rank) ask(rank, in_group(allreduce("a"), "g", 2, 0), 0);
  EXPECT_EQ(stalls_.next_deadline(table_), at(30));
  EXPECT_THAT(stalls_.warnings(table_, at(30)),
              ElementsAre("allreduce 'a' has waited 30.0 s for the rest of group 'g', of whose 2 "
                          "members 1 were submitted by some "
                          "rank and 1 by every rank"));
  const auto expired = stalls_.expired(table_, at(600));
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(stalls_.error_text(table_, *expired.front(), at(600)),
            "allreduce 'a': the rest of its group was not submitted by every rank within 600.0 s "
            "(stall_shutdown): group 'g', of "
            "whose 2 members 1 were submitted by some rank and 1 by every rank; every rank must "
            "submit all members of a group");
}

TEST_F(StallInspectorTest, LongListsAreCut) {
  ProcessSetTable sets(20);
  TableByRank table(sets, 20);
  StallInspector stalls({seconds(1), seconds(2)}, std::vector<std::string>(20, "h"));
  for (int i = 0; i < 5; ++i)
    table.add(1, allreduce(numbered("t", static_cast<std::uint64_t>(i))), std::nullopt, at(0));
  table.add(0, allreduce("a"), std::nullopt, at(0));
  const std::string text = stalls.error_text(table, table.pending().back(), at(9));
  EXPECT_THAT(text, HasSubstr("waits for allreduce 't0', allreduce 't1', allreduce 't2', ...;"));
  EXPECT_THAT(text, HasSubstr("; and 11 more ranks;"));
}

TEST_F(StallInspectorTest, TheNextDeadlineIsThatOfTheNextReport) {
  EXPECT_FALSE(stalls_.next_deadline(table_));
  ask(0, allreduce("a"), 10);
  ask(0, allreduce("b"), 20);
  EXPECT_EQ(stalls_.next_deadline(table_), at(40));
  EXPECT_THAT(stalls_.warnings(table_, at(40)),
              ElementsAre(HasSubstr(
                  "allreduce 'a' and 1 more operation have waited 30.0 s for 2 of 3 ranks")))
      << "one line for the same ranks";
  EXPECT_EQ(stalls_.next_deadline(table_), at(610));
  ask(1, allreduce("c"), 45);
  EXPECT_EQ(stalls_.next_deadline(table_), at(75));
}

TEST_F(StallInspectorTest, AnOperationThatGoesOnIsReportedOnceIfItWasWarnedOf) {
  for (const char* const name : {"young", "old", "silent"})
    ask(0, allreduce(name), name == std::string("old") ? 10 : 12);
  std::vector<PendingRef> all;
  for (PendingRef tensor = table_.pending().begin(); tensor != table_.pending().end(); ++tensor)
    all.push_back(tensor);
  stalls_.record_resumed(all, at(40));
  EXPECT_THAT(stalls_.release_resumptions(), IsEmpty()) << "there was no warning";
  all[0]->warned = all[1]->warned = true;
  stalls_.record_resumed(all, at(42));
  EXPECT_THAT(
      stalls_.release_resumptions(),
      ElementsAre(
          "allreduce 'old' and 1 more operation go on after 32.0 s: every rank has submitted "
          "them by now"));
  EXPECT_THAT(stalls_.release_resumptions(), IsEmpty());
  stalls_.record_resumed(std::span(all).first(1), at(42));
  stalls_.record_resumed(std::span(all).last(1), at(42));
  EXPECT_THAT(stalls_.release_resumptions(),
              ElementsAre("allreduce 'young' goes on after 30.0 s: every rank has submitted it by "
                          "now"));
}

TEST_F(StallInspectorTest, ZeroMeansNever) {
  ask(0, allreduce("a"), 0);
  StallInspector silent({}, {"a", "b", "c"});
  EXPECT_THAT(silent.warnings(table_, at(100000)), IsEmpty());
  EXPECT_THAT(silent.expired(table_, at(100000)), IsEmpty());
  EXPECT_FALSE(silent.next_deadline(table_));
  const StallInspector only_ends({Duration::zero(), seconds(5)}, {"a", "b", "c"});
  EXPECT_EQ(only_ends.next_deadline(table_), at(5));
}

}  // namespace
}  // namespace hvd::control
