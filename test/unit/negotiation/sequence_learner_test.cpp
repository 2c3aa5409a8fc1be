#include "negotiation/sequence_learner.h"

#include <gtest/gtest.h>

#include <string_view>

namespace hvd::control {
namespace {

using Bundles = std::vector<wire::SlotBundle>;

/// Operations "a", "b", ... in the slots 0, 1, ...; "x" and "y" are a group of two.
class SequenceLearnerTest : public ::testing::Test {
 protected:
  SequenceLearnerTest() {
    for (std::uint32_t slot = 0; slot < 26; ++slot) {
      wire::Request request;
      request.unnamed = request.in_sequence = true;
      request.name = wire::unnamed_name(request, slot);
      request.shape = {slot + 1};
      if (slot >= 23 && slot <= 24) {
        request.group_size = 2;
        request.group_index = static_cast<int>(slot) - 23;
      }
      cache_.put({request, {}}, slot + 1);
    }
  }
  static std::uint32_t slot_of(char operation) {
    return static_cast<std::uint32_t>(operation - 'a');
  }
  /// One plan. @param batches separated by blanks
  bool plan(std::string_view batches) {
    wire::Plan plan;
    plan.batches.emplace_back();
    for (const char operation : batches) {
      if (operation == ' ') {
        plan.batches.emplace_back();
      } else {
        plan.batches.back().tensors.emplace_back(wire::SlotUse{slot_of(operation), ordinal_++});
      }
    }
    return learner_.observe(plan, cache_);
  }
  /// A plan for each operation. @return how many were planned when a replay was due, or -1
  int run(std::string_view operations) {
    for (std::size_t i = 0; i < operations.size(); ++i) {
      if (plan(operations.substr(i, 1))) return static_cast<int>(i) + 1;
    }
    return -1;
  }
  std::string schedule() const {
    std::string text;
    for (const wire::SlotBundle& bundle : learner_.schedule()) {
      for (const auto& batch : bundle) {
        for (const std::uint32_t slot : batch) text += static_cast<char>('a' + slot);
      }
    }
    return text;
  }

  ResponseCache cache_{26};
  SequenceLearner learner_{0};
  std::uint64_t ordinal_ = 7;
};

TEST_F(SequenceLearnerTest, FindsAPeriodInWhichOperationsRepeat) {
  EXPECT_EQ(run("abcabdabcabd"), 12);
  EXPECT_EQ(schedule(), "abcabd");
}

TEST_F(SequenceLearnerTest, APeriodMayBeginInTheMiddleOfAStep) {
  EXPECT_EQ(run("zcabcabcab"), 7);
  EXPECT_EQ(schedule(), "cab");
}

// A layer of equal shapes looks like a period.
TEST_F(SequenceLearnerTest, AReplayOfAPartOfAStepIsFollowedByOneOfTheStep) {
  EXPECT_EQ(run("aaaab"), 2);
  learner_.end_replay(2);
  ordinal_ += 2;
  EXPECT_EQ(run("baaaabaaaabaaaabaaaab"), 10) << "no longer after two";
  EXPECT_EQ(schedule(), "baaaa");
  learner_.end_replay(5000);
  EXPECT_EQ(run("aaaacaaaac"), 10) << "a period as long as that of a replay that has lasted";
}

TEST_F(SequenceLearnerTest, AProgramWithoutLongPeriodsIsReplayedInTheEnd) {
  ASSERT_EQ(run("aa"), 2);
  learner_.end_replay(100);
  int replays = 0;
  for (int i = 0; i < 40; ++i) {
    const std::string loop = std::string(50, 'a') + std::string(1, static_cast<char>('b' + i % 20));
    if (run(loop) >= 0) {
      ++replays;
      learner_.end_replay(30);
    }
  }
  EXPECT_GT(replays, 0);
  EXPECT_LT(replays, 20);
}

TEST_F(SequenceLearnerTest, OperationsThatWerePlannedOutOfOrderAreSorted) {
  const auto swapped = [this](char first, char second) {
    wire::Plan plan;
    plan.batches.push_back({{wire::SlotUse{slot_of(second), ordinal_ + 1}}});
    EXPECT_FALSE(learner_.observe(plan, cache_)) << "the first one is missing";
    plan.batches = {{{wire::SlotUse{slot_of(first), ordinal_}}}};
    ordinal_ += 2;
    return learner_.observe(plan, cache_);
  };
  EXPECT_FALSE(plan("c"));
  EXPECT_FALSE(swapped('a', 'b'));
  EXPECT_FALSE(plan("c"));
  EXPECT_TRUE(swapped('a', 'b'));
  EXPECT_EQ(schedule(), "cab");
}

TEST_F(SequenceLearnerTest, AnOrdinalThatIsTooLowBeginsAnew) {
  ordinal_ = 100;
  EXPECT_EQ(run("ab"), -1);
  ordinal_ = 50;
  EXPECT_EQ(run("ab"), -1);
  EXPECT_EQ(run("aba"), 3);
}

TEST_F(SequenceLearnerTest, ABatchIsKeptWhereItsOperationsFollowEachOther) {
  EXPECT_FALSE(plan("ab c"));
  EXPECT_TRUE(plan("ab c"));
  EXPECT_EQ(learner_.schedule(), (Bundles{{{0, 1}}, {{2}}}));
  learner_ = SequenceLearner(0);
  // In one plan: a and c share a batch, and b, which lies between them, has one of its own.
  for (int step = 0; step < 2; ++step) {
    wire::Plan plan;
    plan.batches = {{{wire::SlotUse{0, ordinal_}, wire::SlotUse{2, ordinal_ + 2}}},
                    {{wire::SlotUse{1, ordinal_ + 1}}}};
    ordinal_ += 3;
    EXPECT_EQ(learner_.observe(plan, cache_), step == 1);
  }
  EXPECT_EQ(learner_.schedule(), (Bundles{{{0}}, {{1}}, {{2}}}));
}

TEST_F(SequenceLearnerTest, TheFewerBatchesAreChosenUnlessTheLastReplayWasShort) {
  EXPECT_FALSE(plan("ab"));
  EXPECT_TRUE(plan("a b"));
  EXPECT_EQ(learner_.schedule(), (Bundles{{{0, 1}}}));
  learner_.end_replay(1);
  EXPECT_FALSE(plan("ab"));
  EXPECT_FALSE(plan("ab"));
  for (int i = 0; i < 8 && !plan("a b"); ++i) continue;
  EXPECT_EQ(learner_.schedule(), (Bundles{{{0}}, {{1}}}));
}

TEST_F(SequenceLearnerTest, AGroupIsABundleAndNeverCut) {
  EXPECT_EQ(run("xy"), -1);
  EXPECT_EQ(run("a"), -1);
  EXPECT_EQ(run("x"), -1);
  EXPECT_EQ(run("y"), -1);
  EXPECT_EQ(run("a"), 1);
  EXPECT_EQ(learner_.schedule(), (Bundles{{{23}, {24}}, {{0}}}));
  learner_ = SequenceLearner(0);
  EXPECT_EQ(run("yaxyaxya"), 7) << "after two periods y would begin it";
  EXPECT_EQ(schedule(), "axy");
}

TEST_F(SequenceLearnerTest, WhatCannotBeReplayedBeginsAnew) {
  EXPECT_EQ(run("a"), -1);
  wire::Plan other;
  other.batches.push_back({{wire::Response{cache_.at(0).request, {}}}});
  EXPECT_FALSE(learner_.observe(other, cache_)) << "in full";
  EXPECT_EQ(run("a"), -1);
  other.batches = {{{wire::SlotUse{0, ordinal_++}}, {1}}};
  EXPECT_FALSE(learner_.observe(other, cache_)) << "without a rank";
  EXPECT_EQ(run("a"), -1);
  other.batches.clear();
  other.errors.emplace_back();
  EXPECT_FALSE(learner_.observe(other, cache_));
  wire::Request named = cache_.at(0).request;
  named.unnamed = named.in_sequence = false;
  named.name = "named";
  cache_.put({named, {}}, 100);  // in place of the least recently used slot
  other.errors.clear();
  other.batches = {{{wire::SlotUse{*cache_.find(named), 0}}}};
  EXPECT_EQ(run("c"), -1);
  EXPECT_FALSE(learner_.observe(other, cache_));
  EXPECT_EQ(run("cc"), 2);
}

}  // namespace
}  // namespace hvd::control
