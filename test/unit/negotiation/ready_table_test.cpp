#include "negotiation/ready_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "hvd/error.h"
#include "unit/negotiation/cluster.h"
#include "unit/negotiation/table_by_rank.h"

namespace hvd::control {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class ReadyTableTest : public ::testing::Test {
 protected:
  PendingRef ask(int rank, wire::Request request) {
    return table_.add(rank, std::move(request), std::nullopt, {});
  }
  void ask_all(const wire::Request& request) {
    for (int rank = 0; rank < 3; ++rank) ask(rank, request);
  }
  std::vector<std::string> take_names() {
    std::vector<std::string> names;
    for (const auto& tensor : table_.extract_ready()) names.push_back(tensor->request.name);
    return names;
  }

  ProcessSetTable sets_{3};
  TableByRank table_{sets_, 3};
};

TEST_F(ReadyTableTest, ReadyWhenTheLastHasSubmitted) {
  ask(2, allreduce("a"));
  const auto tensor = ask(0, allreduce("a"));
  EXPECT_FALSE(table_.anything_ready());
  EXPECT_THAT(table_.missing(*tensor).to_vector(), ElementsAre(1));
  EXPECT_TRUE(table_.has_reported(*tensor, 2));
  EXPECT_FALSE(table_.has_reported(*tensor, 1));
  ask(1, allreduce("a"));
  EXPECT_TRUE(table_.anything_ready());
  EXPECT_THAT(take_names(), ElementsAre("a"));
  EXPECT_FALSE(table_.anything_ready());
  EXPECT_EQ(table_.pending().size(), 1u);
  table_.erase(tensor);
  EXPECT_TRUE(table_.pending().empty());
  ask_all(allreduce("a"));
  EXPECT_THAT(take_names(), ElementsAre("a"));
}

TEST_F(ReadyTableTest, AskingTwiceOrFromOutsideIsABrokenPeer) {
  ask(1, allreduce("a"));
  EXPECT_THROW(ask(1, allreduce("a")), Error);
  wire::Request elsewhere = allreduce("b");
  elsewhere.process_set = 7;
  EXPECT_THROW(ask(1, elsewhere), Error);
}

// Rank 0's order counts, whichever rank is fastest and whichever tensor is complete first.
TEST_F(ReadyTableTest, TheOrderIsThatOfTheSetsFirstMember) {
  std::vector<int> ranks = {0, 1, 2};
  do {
    TableByRank table(sets_, 3);
    for (const int rank : ranks) {
      std::vector<std::string> order = {"c", "a", "b"};
      if (rank != 0) std::rotate(order.begin(), order.begin() + rank, order.end());
      for (const auto& name : order) table.add(rank, allreduce(name), std::nullopt, {});
    }
    std::string names;
    for (const auto& tensor : table.extract_ready()) names += tensor->request.name;
    EXPECT_EQ(names, "cab");
  } while (std::next_permutation(ranks.begin(), ranks.end()));
}

TEST_F(ReadyTableTest, CompressedOperationsCountTheirSentBytes) {
  TableByRank table(sets_, 3);
  wire::Request request = allreduce("r", {3, 5});
  EXPECT_EQ(batch_bytes(*table.add(0, request, std::nullopt, {})), 15 * 4);
  request.name = "c";
  request.compression = Compression::kBFloat16;
  EXPECT_EQ(batch_bytes(*table.add(0, request, std::nullopt, {})), 15 * 2);
}

TEST_F(ReadyTableTest, PlansAndErrorsDoNotDependOnTheOrderOfArrival) {
  std::vector<int> ranks = {0, 1, 2};
  const std::vector<std::vector<std::int64_t>> shapes = {{3}, {3}, {5}};
  do {
    TableByRank table(sets_, 3);
    PendingRef gathered;
    PendingRef reduced;
    for (const int rank : ranks) {
      const auto& shape = shapes[static_cast<std::size_t>(rank)];
      gathered = table.add(rank, allgather("g", {rank + 1, 2}), std::nullopt, {});
      reduced = table.add(rank, allreduce("r", shape), std::nullopt, {});
    }
    EXPECT_EQ(gathered->request, allgather("g", {1, 2}));
    EXPECT_THAT(gathered->first_dims, ElementsAre(1, 2, 3));
    EXPECT_EQ(batch_bytes(*gathered), 6 * 2 * 4);
    EXPECT_EQ(reduced->mismatch,
              "allreduce 'r': shape differs: rank 0 [3], rank 2 [5]; every rank must submit the "
              "same shape");
  } while (std::next_permutation(ranks.begin(), ranks.end()));
}

TEST_F(ReadyTableTest, ThreeOpinionsGiveTheTwoLowestRanks) {
  std::vector<int> ranks = {0, 1, 2};
  do {
    TableByRank table(sets_, 3);
    PendingRef tensor;
    for (const int rank : ranks) tensor = table.add(rank, allreduce("r", {rank}), std::nullopt, {});
    EXPECT_THAT(*tensor->mismatch, HasSubstr("rank 0 [0], rank 1 [1]"));
  } while (std::next_permutation(ranks.begin(), ranks.end()));
}

TEST_F(ReadyTableTest, ARequestThatNoRankMayMakeIsAMismatch) {
  ask_all(allgather("a", {}));
  wire::Request request = allreduce("b");
  request.kind = OpKind::kBroadcast;
  request.root = 3;
  ask_all(request);
  constexpr auto kMaxDim = std::numeric_limits<std::int64_t>::max() / 8;
  ask_all(allgather("c", {kMaxDim}));
  std::vector<std::string> texts;
  for (const auto& tensor : table_.extract_ready())
    texts.push_back(tensor->mismatch.value_or("(none)"));
  EXPECT_THAT(texts, ElementsAre(HasSubstr("scalar"), HasSubstr("root rank 3"),
                                 HasSubstr("more than 2^63 bytes")));
}

TEST_F(ReadyTableTest, HitsOnTheSameSlotAreCountedWithoutComparing) {
  const std::vector<std::int64_t> none;
  EXPECT_FALSE(table_.add_hit(1, 9));
  const auto tensor = table_.add(1, allreduce("a"), CacheHit{9, &none}, {});
  EXPECT_TRUE(table_.add_hit(2, 9));
  EXPECT_FALSE(table_.add_hit(2, 9));  // add() would throw here
  EXPECT_TRUE(table_.add_hit(0, 9));
  EXPECT_EQ(tensor->reference_rank, 0);
  EXPECT_THAT(take_names(), ElementsAre("a"));
  table_.erase(tensor);
  EXPECT_FALSE(table_.add_hit(0, 9));
}

TEST_F(ReadyTableTest, ARequestInFullOrANewMeaningOfTheSlotEndsTheShortCut) {
  const std::vector<std::int64_t> none;
  table_.add(1, allreduce("a"), CacheHit{9, &none}, {});
  ask(2, allreduce("a", {5}));
  EXPECT_FALSE(table_.add_hit(0, 9));
  table_.add(1, allreduce("b"), CacheHit{4, &none}, {});
  table_.forget_slot(4);
  EXPECT_FALSE(table_.add_hit(0, 4));
  table_.forget_slot(4);
}

TEST_F(ReadyTableTest, FirstDimensionsOfHitsComeFromTheEntry) {
  const std::vector<std::int64_t> dims = {1, 2, 3};
  const auto tensor = table_.add(2, allgather("g", {3, 4}), CacheHit{0, &dims}, {});
  EXPECT_TRUE(table_.add_hit(0, 0));
  EXPECT_TRUE(table_.add_hit(1, 0));
  EXPECT_THAT(tensor->first_dims, ElementsAre(1, 2, 3));
  EXPECT_EQ(tensor->request.shape, (std::vector<std::int64_t>{1, 4}));
}

TEST_F(ReadyTableTest, AGroupBecomesReadyTogether) {
  ask_all(in_group(allreduce("a"), "g", 2, 0));
  EXPECT_FALSE(table_.anything_ready());
  EXPECT_TRUE(table_.pending().front().held);
  ask_all(allreduce("x"));
  EXPECT_THAT(take_names(), ElementsAre("x"));
  ask_all(in_group(allreduce("b"), "g", 2, 1));
  EXPECT_THAT(take_names(), ElementsAre("a", "b"));
  EXPECT_FALSE(table_.pending().front().held);
}

TEST_F(ReadyTableTest, AFailureReachesMembersThatNoRankHasSubmittedYet) {
  ask_all(in_group(allreduce("a"), "g", 3, 0));
  const auto failing = ask(0, in_group(allreduce("b"), "g", 3, 1));
  table_.fail_group(*failing, {StatusCode::kStalled, "late"});
  table_.erase(failing);
  EXPECT_THAT(take_names(), ElementsAre("a"));
  table_.erase(table_.pending().begin());
  ask_all(in_group(allreduce("c"), "g", 3, 2));
  const auto ready = table_.extract_ready();
  ASSERT_EQ(ready.size(), 1u);
  ASSERT_TRUE(table_.group_failure(*ready.front()));
  EXPECT_EQ(table_.group_failure(*ready.front())->code, StatusCode::kStalled);
  table_.erase(ready.front());
  // The next use of the group starts from the beginning.
  ask_all(in_group(allreduce("a"), "g", 3, 0));
  EXPECT_TRUE(table_.pending().front().held);
  EXPECT_FALSE(table_.group_failure(table_.pending().front()));
}

TEST_F(ReadyTableTest, AMemberThatIsSubmittedAgainBeginsTheNextUse) {
  const auto failing = ask(0, in_group(allreduce("a"), "g", 2, 0));
  table_.fail_group(*failing, {StatusCode::kStalled, "late"});
  table_.erase(failing);
  ask_all(in_group(allreduce("a"), "g", 2, 0));
  ask_all(in_group(allreduce("b"), "g", 2, 1));
  const auto ready = table_.extract_ready();
  EXPECT_EQ(ready.size(), 2u);
  EXPECT_FALSE(table_.group_failure(*ready.front()));
}

TEST_F(ReadyTableTest, MembersMustAgreeOnTheSizeOfTheirGroup) {
  ask_all(in_group(allreduce("a"), "g", 2, 0));
  ask_all(in_group(allreduce("b"), "g", 3, 1));
  const auto ready = table_.extract_ready();
  ASSERT_EQ(ready.size(), 2u);
  EXPECT_EQ(table_.group_failure(*ready.front())->message,
            "one member has a group of 2 members, allreduce 'b' has one of 3");
}

TEST_F(ReadyTableTest, MembersMustAgreeOnTheNamesOfTheirGroup) {
  ask_all(in_group(allreduce("a"), "g", 2, 0));
  ask(0, in_group(allreduce("b"), "g", 2, 1));
  ask(2, in_group(allreduce("b"), "g", 2, 1));
  EXPECT_FALSE(table_.anything_ready());
  const auto other = ask(1, in_group(allreduce("c"), "g", 2, 1));
  const auto ready = table_.extract_ready();
  ASSERT_EQ(ready.size(), 1u) << "a complete tensor does not wait for the others";
  EXPECT_EQ(table_.group_failure(*ready.front())->message,
            "member 1 is allreduce 'b' on rank 0 and allreduce 'c' on rank 1");
  EXPECT_TRUE(table_.group_failure(*other));
}

TEST_F(ReadyTableTest, ARankThatIsAheadUsesAGroupForOtherNames) {
  for (const int rank : {1, 0, 2}) {
    for (const char* pair : {"ab", "cd"}) {
      ask(rank, in_group(allreduce({pair[0]}), "g", 2, 0));
      ask(rank, in_group(allreduce({pair[1]}), "g", 2, 1));
    }
  }
  for (const auto& tensor : table_.pending()) EXPECT_FALSE(table_.group_failure(tensor));
  EXPECT_THAT(take_names(), ElementsAre("a", "b", "c", "d"));
}

TEST_F(ReadyTableTest, WhenRanksDisagreeAboutTheGroupAllGroupsConcernedFail) {
  ask(0, in_group(allreduce("a"), "g", 2, 0));
  ask(1, in_group(allreduce("a"), "h", 2, 0));
  const auto tensor = ask(2, in_group(allreduce("a"), "g", 2, 0));
  EXPECT_THAT(*tensor->mismatch,
              HasSubstr("group differs: rank 0 'g' of 2, member 0, rank 1 'h' of 2, member 0"));
  ask_all(in_group(allreduce("b"), "h", 2, 1));
  EXPECT_THAT(take_names(), ElementsAre("a"));
  table_.fail_group(*tensor, {StatusCode::kMismatch, *tensor->mismatch});
  EXPECT_THAT(take_names(), ElementsAre("b"));
}

TEST_F(ReadyTableTest, ErasingReadyOperationsSubtractsTheirBytes) {
  ask_all(allreduce("a"));
  ask_all(allreduce("b", {100}));
  table_.erase(table_.pending().begin());
  std::vector<std::int64_t> gathered;
  EXPECT_THAT(table_.extract_ready([&](const FusionSort&, std::int64_t bytes) {
    gathered.push_back(bytes);
    return true;
  }),
              IsEmpty());
  EXPECT_THAT(gathered, ElementsAre(400));
  EXPECT_TRUE(table_.anything_ready());
  EXPECT_THAT(take_names(), ElementsAre("b"));
  EXPECT_FALSE(table_.anything_ready());
}

TEST_F(ReadyTableTest, OnlySortsThatMayShareABatchGather) {
  wire::Request alone = allreduce("alone"), adasum = allreduce("adasum"), half = allreduce("half");
  alone.alone = true;
  adasum.op = ReduceOp::kAdasum;
  half.dtype = DataType::kFloat16;
  ask_all(allreduce("a"));
  ask_all(allreduce("b"));
  for (const wire::Request& request : {alone, adasum, half}) ask_all(request);
  ask_all(unnamed(OpKind::kBarrier, 0, {}));
  const auto floats = [](const FusionSort& sort, std::int64_t bytes) {
    return sort.dtype == DataType::kFloat32 && bytes < 33;
  };
  std::vector<std::string> taken;
  for (const auto& tensor : table_.extract_ready(floats)) taken.push_back(tensor->request.name);
  EXPECT_THAT(taken, UnorderedElementsAre("alone", "adasum", "half", "barrier.unnamed.0"));
  EXPECT_THAT(take_names(), ElementsAre("a", "b"));
}

// Its members are planned together, so that no member waits for another that has run.
TEST_F(ReadyTableTest, AGroupOfSeveralSortsDoesNotGather) {
  const auto always = [](const FusionSort&, std::int64_t) { return true; };
  wire::Request half = in_group(allreduce("b"), "mixed", 2, 1);
  half.dtype = DataType::kFloat16;
  ask_all(in_group(allreduce("a"), "mixed", 2, 0));
  ask_all(half);
  ask_all(in_group(allreduce("c"), "alike", 2, 0));
  ask_all(in_group(allreduce("d"), "alike", 2, 1));
  EXPECT_EQ(table_.extract_ready(always).size(), 2U);
  EXPECT_THAT(take_names(), ElementsAre("c", "d"));
}

}  // namespace
}  // namespace hvd::control
