// Process sets that repeat their steps without negotiation, each by itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/stepped_ranks.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

class ReplayedSets : public ::testing::Test {
 protected:
  static constexpr int kRanks = 4;

  ReplayedSets() {
    // Chains of sets that overlap, with rank 0 and without.
    for (const auto& ranks : std::vector<std::vector<int>>{{0, 1}, {1, 2}, {2, 3}}) {
      std::vector<Operation> made;
      for (const int rank : ranks)
        made.push_back(submit_one(job_.rank(rank), {.parameters = AddProcessSet{ranks, true}}));
      EXPECT_TRUE(run(made));
      members_[static_cast<int>(made.front().result())] = ranks;
    }
    members_[0] = {0, 1, 2, 3};
  }

  static LocalJobOptions options() {
    LocalJobOptions options = stepped(kRanks);
    options.runtime.stall_shutdown = seconds(20);
    return options;
  }
  bool run(const std::vector<Operation>& operations, Duration timeout = seconds(5)) {
    return job_.run_until(clock_, timeout, [&] {
      return std::ranges::all_of(operations, [](const Operation& one) { return one.done(); });
    });
  }
  Submission allreduce(int rank, int set, const std::string& name, std::size_t elements = 3) {
    std::vector<float>& memory = data_[rank][std::to_string(set) + name];
    memory.assign(elements, static_cast<float>(rank + 1));
    Submission submission = float_operation(memory, name);
    submission.process_set = set;
    return submission;
  }
  Operation submit(int rank, int set, const std::string& name = "w", std::size_t elements = 3) {
    return submit_one(job_.rank(rank), allreduce(rank, set, name, elements));
  }
  /// All members of these sets run operations of two names in each, `count` times.
  void steps(const std::vector<int>& sets, int count) {
    for (int step = 0; step < count; ++step) {
      for (const char* const name : {"w", "v"}) {
        std::vector<Operation> operations;
        for (const int set : sets) {
          for (const int rank : members_.at(set)) operations.push_back(submit(rank, set, name));
        }
        ASSERT_TRUE(run(operations));
        for (const Operation& one : operations)
          ASSERT_TRUE(one.status().ok()) << one.status().message;
        for (const int set : sets) expect_sums(set, name);
      }
    }
  }
  /// An unnamed operation in sequence.
  Operation call(int rank, int set, std::size_t elements) {
    Submission submission = allreduce(rank, set, "", elements);
    submission.in_sequence = true;
    return submit_one(job_.rank(rank), std::move(submission));
  }
  /// Several calls, most of them alike.
  void calls(const std::vector<int>& sets, int count) {
    for (int step = 0; step < count; ++step) {
      for (const std::size_t elements : {3U, 3U, 3U, 5U}) {
        std::vector<Operation> operations;
        for (const int set : sets) {
          for (const int rank : members_.at(set)) operations.push_back(call(rank, set, elements));
        }
        ASSERT_TRUE(run(operations));
        for (const int set : sets) expect_sums(set, "");
      }
    }
  }
  void expect_sums(int set, const std::string& name) {
    float sum = 0;
    for (const int rank : members_.at(set)) sum += static_cast<float>(rank + 1);
    for (const int rank : members_.at(set))
      EXPECT_EQ(data_[rank][std::to_string(set) + name].back(), sum) << "set " << set;
  }
  struct Counts {
    std::uint64_t messages = 0, plans = 0, replayed = 0;
  };
  Counts counts() {
    Counts all;
    for (int rank = 0; rank < kRanks; ++rank) {
      const Metrics metrics = job_.rank(rank).metrics();
      all.messages += metrics.control_messages_sent;
      all.plans += metrics.plans_applied;
      all.replayed += metrics.locked_operations;
    }
    return all;
  }
  void expect_steady(const std::vector<int>& sets, int count = 10) {
    const Counts before = counts();
    steps(sets, count);
    const Counts after = counts();
    std::uint64_t operations = 0;
    for (const int set : sets) operations += 2 * members_.at(set).size();
    EXPECT_EQ(after.messages, before.messages);
    EXPECT_EQ(after.plans, before.plans);
    EXPECT_EQ(after.replayed - before.replayed, operations * static_cast<std::uint64_t>(count));
  }

  VirtualClock clock_;
  LocalJob job_{options(), clock_};
  std::map<int, std::vector<int>> members_;
  std::map<int, std::map<std::string, std::vector<float>>> data_;
};

TEST_F(ReplayedSets, ASteadyStepOfASetSendsNoMessage) {
  for (const int set : {1, 2, 3}) {
    steps({set}, 6);
    expect_steady({set});
  }
  expect_steady({1, 2, 3});
}

TEST_F(ReplayedSets, OverlappingSetsAndAllRanksRepeatSideBySide) {
  steps({0, 1, 2, 3}, 8);
  expect_steady({0, 1, 2, 3});
  expect_steady({3, 0});
}

TEST_F(ReplayedSets, EqualCallsInSequenceAreReplayedInTheirOrder) {
  calls({1, 2, 0}, 12);
  const Counts before = counts();
  calls({1, 2, 0}, 10);
  const Counts after = counts();
  EXPECT_EQ(after.messages, before.messages);
  EXPECT_EQ(after.replayed - before.replayed, 10U * 4U * 8U);
}

// Both calls are in the schedule, but at other times.
TEST_F(ReplayedSets, CallsInSequenceThatDifferAreAMismatchAtOnce) {
  for (const int set : {1, 0}) {
    calls({set}, 20);
    std::vector<Operation> differ;
    for (const int rank : members_.at(set)) differ.push_back(call(rank, set, rank == 1 ? 5 : 3));
    ASSERT_TRUE(run(differ, milliseconds(100)));
    for (const Operation& one : differ) {
      EXPECT_EQ(one.status().code, StatusCode::kMismatch) << one.status().message;
      EXPECT_THAT(one.status().message, HasSubstr("rank 0 [3], rank 1 [5]"));
    }
    calls({set}, 3);
  }
}

TEST_F(ReplayedSets, AnOperationOutsideTheScheduleEndsOnlyTheReplayOfItsSet) {
  steps({0, 1, 2, 3}, 8);
  ASSERT_TRUE(run({submit(1, 2, "other"), submit(2, 2, "other")}, milliseconds(100)));
  expect_steady({0, 1, 3});
  steps({2}, 6);
  expect_steady({0, 1, 2, 3});
}

TEST_F(ReplayedSets, AChangeOfTheSetsEndsAllReplaysOfARank) {
  steps({0, 1, 2, 3}, 8);
  ASSERT_TRUE(run({submit_one(job_.rank(0), {.parameters = RemoveProcessSet{1}}),
                   submit_one(job_.rank(1), {.parameters = RemoveProcessSet{1}})},
                  milliseconds(100)));
  expect_steady({3});
  EXPECT_THROW(submit(0, 1), UsageError);
  steps({0, 2}, 6);
  expect_steady({0, 2, 3});
}

TEST_F(ReplayedSets, RanksThatDisagreeInARepeatedSetGetTheErrorAtOnce) {
  steps({0, 1, 2, 3}, 8);
  const std::vector<Operation> differ = {submit(1, 2, "w", 3), submit(2, 2, "w", 4)};
  ASSERT_TRUE(run(differ, milliseconds(100)));
  for (const Operation& one : differ) {
    EXPECT_EQ(one.status().code, StatusCode::kMismatch) << one.status().message;
    EXPECT_THAT(one.status().message, HasSubstr("rank 1 [3], rank 2 [4]"));
  }
  expect_steady({0, 1, 3});
}

TEST_F(ReplayedSets, AMemberThatStaysAwayIsNamed) {
  steps({0, 2}, 8);
  const Operation waits = submit(1, 2);
  ASSERT_TRUE(run({waits}, seconds(60)));
  EXPECT_EQ(waits.status().code, StatusCode::kStalled);
  EXPECT_THAT(waits.status().message, HasSubstr("rank 2"));
  expect_steady({0});
}

TEST_F(ReplayedSets, AMemberThatDiesEndsARepeatedOperation) {
  steps({2}, 8);
  const Operation waits = submit(1, 2);
  job_.kill(2);
  ASSERT_TRUE(run({waits}, seconds(1)));
  EXPECT_EQ(waits.status().code, StatusCode::kPeerLost);
  EXPECT_EQ(waits.status().rank, 2);
}

// The ranks wait for each other in two sets, which no replay may hide.
TEST_F(ReplayedSets, OperationsOfTwoSetsInOppositeOrdersRun) {
  steps({1, 2}, 8);
  std::vector<Operation> first = {submit(0, 1), submit(2, 2)};
  job_.run_until(clock_, seconds(3), [] { return false; });
  first.push_back(submit(1, 2));
  ASSERT_TRUE(run({first[1], first[2]}, milliseconds(100)));
  first.push_back(submit(1, 1));
  ASSERT_TRUE(run(first, milliseconds(100)));
  for (const Operation& one : first) EXPECT_TRUE(one.status().ok()) << one.status().message;
}

TEST_F(ReplayedSets, AJoinEndsTheReplaysOfItsRank) {
  steps({0, 1, 2, 3}, 8);
  std::vector<Operation> joins = {submit_one(job_.rank(1), {.parameters = Join{}})};
  const Operation alone = submit(0, 1);
  ASSERT_TRUE(run({alone}, milliseconds(100)));
  EXPECT_TRUE(alone.status().ok()) << alone.status().message;
  EXPECT_EQ((data_[0]["1w"].back()), 1.0F) << "rank 1 has joined";
  expect_steady({3});
  for (const int rank : {0, 2, 3})
    joins.push_back(submit_one(job_.rank(rank), {.parameters = Join{}}));
  ASSERT_TRUE(run(joins, milliseconds(100)));
  steps({0, 1, 2, 3}, 8);
  expect_steady({0, 1, 2, 3});
}

}  // namespace
}  // namespace hvd::testing
