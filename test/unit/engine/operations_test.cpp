// Operations that are made of several collectives, on process sets and with joined ranks;
// the plain operations are in the simulation and in the conformance suite.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/local_backend.h"
#include "support/local_job.h"
#include "support/stepped_ranks.h"

namespace hvd::testing {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Adasum by its definition, pair by pair, on whole vectors.
std::vector<double> adasum(const std::vector<double>& a, const std::vector<double>& b) {
  const double product = std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  const double a2 = std::inner_product(a.begin(), a.end(), a.begin(), 0.0);
  const double b2 = std::inner_product(b.begin(), b.end(), b.begin(), 0.0);
  std::vector<double> sum(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum[i] = (a2 == 0 ? 1 : 1 - product / (2 * a2)) * a[i] +
             (b2 == 0 ? 1 : 1 - product / (2 * b2)) * b[i];
  }
  return sum;
}

std::vector<double> adasum_tree(std::vector<std::vector<double>> vectors) {
  while (vectors.size() > 1) {
    std::vector<std::vector<double>> next;
    for (std::size_t i = 0; i + 1 < vectors.size(); i += 2)
      next.push_back(adasum(vectors[i], vectors[i + 1]));
    if (vectors.size() % 2 == 1) next.push_back(vectors.back());
    vectors = std::move(next);
  }
  return vectors.front();
}

class Adasum : public ::testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(RanksAndElements, Adasum,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5, 7, 8),
                                            ::testing::Values(1, 3, 100)));

TEST_P(Adasum, IsTheTreeOfPairsOnEveryRank) {
  const auto [size, count] = GetParam();
  Ranks ranks(size);
  std::mt19937 random(7);
  std::vector<std::vector<float>> data;
  std::vector<std::vector<double>> vectors;
  for (int rank = 0; rank < size; ++rank) {
    data.emplace_back();
    for (int i = 0; i < count; ++i)
      data.back().push_back(static_cast<float>(static_cast<int>(random() % 200) - 90 + rank) / 16);
    vectors.emplace_back(data.back().begin(), data.back().end());
  }
  for (int rank = 0; rank < size; ++rank) {
    Submission submission = float_operation(data[static_cast<std::size_t>(rank)], "grad");
    submission.parameters = Allreduce{.op = ReduceOp::kAdasum, .postscale = 2};
    ranks.submit(rank, std::move(submission));
  }
  for (const Operation& operation : ranks.run())
    ASSERT_TRUE(operation.status().ok()) << operation.status().message;
  const std::vector<double> expected = adasum_tree(vectors);
  for (int i = 0; i < count; ++i) {
    EXPECT_NEAR(data[0][static_cast<std::size_t>(i)], 2 * expected[static_cast<std::size_t>(i)],
                1e-4);
  }
  for (const auto& other : data) EXPECT_EQ(other, data[0]);
}

TEST(AdasumSpecialCases, OrthogonalVectorsAddUpAndEqualOnesAverage) {
  Ranks ranks(2);
  std::vector<std::vector<float>> data = {{3, 0, 1}, {0, 4, 0}};
  std::vector<std::vector<float>> equal = {{3, 5}, {3, 5}};
  std::vector<std::vector<float>> zero = {{0, 0}, {3, 5}};
  for (int rank = 0; rank < 2; ++rank) {
    for (auto* each : {&data, &equal, &zero}) {
      Submission submission =
          float_operation((*each)[static_cast<std::size_t>(rank)], each == &data    ? "a"
                                                                   : each == &equal ? "b"
                                                                                    : "c");
      submission.parameters = Allreduce{.op = ReduceOp::kAdasum};
      ranks.submit(rank, std::move(submission));
    }
  }
  ranks.run();
  EXPECT_THAT(data[1], ElementsAre(3, 4, 1));
  EXPECT_THAT(equal[1], ElementsAre(3, 5));
  EXPECT_THAT(zero[0], ElementsAre(3, 5));
}

TEST(Sets, AStalledOneDelaysNoOther) {
  Ranks ranks(3);
  const int left = ranks.add_set({0, 1});
  const int right = ranks.add_set({1, 2});
  std::vector<float> waits(4, 1);
  Submission stalled = float_operation(waits, "x");
  stalled.process_set = left;
  const Operation waiting =
      submit_one(ranks.rank(0), std::move(stalled));  // rank 1 never submits it
  std::vector<std::vector<float>> data = {{1, 2}, {3, 4}};
  for (const int rank : {1, 2}) {
    Submission submission = float_operation(data[static_cast<std::size_t>(rank - 1)],
                                            "x");  // the same name in another set
    submission.process_set = right;
    ranks.submit(rank, std::move(submission));
  }
  ranks.run();
  EXPECT_THAT(data[0], ElementsAre(4, 6));
  EXPECT_FALSE(waiting.done());
}

TEST(Sets, ARemovedSetIsRefusedAndItsOperationsEnd) {
  Ranks ranks(2);
  const int set = ranks.add_set({0, 1});
  std::vector<float> data(4, 1);
  Submission submission = float_operation(data, "x");
  submission.process_set = set;
  const Operation waiting = submit_one(ranks.rank(0), std::move(submission));
  ranks.step_a_while();
  ranks.remove_set(set);
  ASSERT_TRUE(waiting.done());
  EXPECT_EQ(waiting.status().code, StatusCode::kUsage);
  EXPECT_THAT(waiting.status().message, HasSubstr("process set 1 was removed"));
  Submission late = float_operation(data, "x");
  late.process_set = set;
  EXPECT_THROW(submit_one(ranks.rank(0), std::move(late)), UsageError);
  // The name is free again elsewhere, and a new set gets a new number.
  EXPECT_EQ(ranks.add_set({0}), 2);
}

TEST(Sets, BadListsAreRefused) {
  Ranks ranks(2);
  for (const std::vector<int>& members : {std::vector<int>{}, {0, 0}, {-1}, {0, 2}})
    EXPECT_THROW(submit_one(ranks.rank(0), {.parameters = AddProcessSet{members}}), UsageError);
  EXPECT_THROW(submit_one(ranks.rank(0), {.parameters = RemoveProcessSet{0}}), UsageError);
}

TEST(Join, AJoinedRankMayNotSubmit) {
  Ranks ranks(2);
  const Operation joined = submit_one(ranks.rank(0), join_operation());
  ranks.step_a_while();
  std::vector<float> data(4, 1);
  EXPECT_THROW(submit_one(ranks.rank(0), float_operation(data, "x")), UsageError);
  ranks.submit(1, join_operation());
  EXPECT_EQ(ranks.run().front().result(), 1);
  EXPECT_EQ(joined.result(), 1);
}

TEST(Join, UnnamedOperationsPairAgainAfterwards) {
  Ranks ranks(2);
  for (int round = 0; round < 2; ++round) {
    std::vector<float> alone(2, 5);
    const Operation joined = submit_one(ranks.rank(0), join_operation());
    ranks.step_a_while();
    for (int i = 0; i < 3; ++i) {  // rank 0 does not count these
      ranks.submit(1, float_operation(alone, ""));
      ranks.run();
    }
    EXPECT_THAT(alone, ElementsAre(5, 5));
    ranks.submit(1, join_operation());
    ranks.run();
    std::vector<std::vector<float>> data = {{1, 2}, {3, 4}};
    for (int rank = 0; rank < 2; ++rank)
      ranks.submit(rank, float_operation(data[static_cast<std::size_t>(rank)], ""));
    for (const Operation& operation : ranks.run())
      EXPECT_TRUE(operation.status().ok()) << operation.status().message;
    EXPECT_THAT(data[0], ElementsAre(4, 6));
  }
}

TEST(Join, FactorsDoNotTouchTheAbsentContribution) {
  for (const ReduceOp op :
       {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum, ReduceOp::kAverage}) {
    Ranks ranks(2);
    const Operation joined = submit_one(ranks.rank(0), join_operation());
    std::vector<float> data = {8, -2};
    Submission submission = float_operation(data, "x");
    submission.parameters = Allreduce{.op = op, .prescale = -0.25};
    ranks.submit(1, std::move(submission));
    ranks.run();
    EXPECT_THAT(data, ElementsAre(-2, 0.5)) << to_string(op);
  }
}

TEST(Join, IsRefusedAsAWholeWithOtherOperationsInOneCall) {
  Ranks ranks(2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  EXPECT_THROW(ranks.rank(1).submit({join_operation(), float_operation(data[1], "x")},
                                    Progress::kBackground),
               UsageError);
  EXPECT_THROW(ranks.rank(1).submit({join_operation(), join_operation()}, Progress::kBackground),
               UsageError);
  for (int rank = 0; rank < 2; ++rank)
    ranks.submit(rank, float_operation(data[static_cast<std::size_t>(rank)], "x"));
  for (const Operation& operation : ranks.run())
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
  EXPECT_THAT(data[1], ElementsAre(3));
  for (int rank = 0; rank < 2; ++rank) ranks.submit(rank, join_operation());
  for (const Operation& operation : ranks.run())
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
}

/// Counts the works of another backend that have not been destroyed.
class CountedBackend final : public Backend {
 public:
  std::string_view name() const noexcept override { return inner_.name(); }
  int score(const Topology& topology, const ChannelSpec& spec,
            const Collective& collective) const noexcept override {
    return inner_.score(topology, spec, collective);
  }
  std::unique_ptr<Channel> open(const ChannelSpec& spec, Peers& peers) override {
    return std::make_unique<CountedChannel>(inner_.open(spec, peers), live_);
  }
  int live() const { return live_; }

 private:
  class CountedWork final : public Work {
   public:
    CountedWork(std::unique_ptr<Work> inner, int& live) : inner_(std::move(inner)), live_(live) {
      ++live_;
    }
    ~CountedWork() override { --live_; }
    bool progress() override { return inner_->progress(); }

   private:
    std::unique_ptr<Work> inner_;
    int& live_;
  };
  class CountedChannel final : public Channel {
   public:
    CountedChannel(std::unique_ptr<Channel> inner, int& live)
        : inner_(std::move(inner)), live_(live) {}
    std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                                 std::span<std::byte> out) override {
      return std::make_unique<CountedWork>(inner_->launch(collective, in, out), live_);
    }
    void abort() noexcept override { inner_->abort(); }

   private:
    std::unique_ptr<Channel> inner_;
    int& live_;
  };
  LocalBackend inner_{std::make_shared<LocalWorld>(2)};
  int live_ = 0;
};

// The operations share a place in the schedule: the second may be submitted before the first has
// ended.
TEST(Locked, SeveralUnnamedOperationsOfAKindMayBeUnderWay) {
  for (int rounds_between = 0; rounds_between < 8; ++rounds_between) {
    VirtualClock clock;
    LocalJob job(stepped(2), clock);
    std::vector<std::vector<float>> data(6, std::vector<float>(8));
    for (int step = 0; step < 40; ++step) {
      const std::size_t at_once = step < 20 ? 1 : 3;  // locked by then
      std::vector<Operation> operations;
      for (std::size_t number = 0; number < at_once; ++number) {
        for (std::size_t rank = 0; rank < 2; ++rank) {
          auto& memory = data[2 * number + rank];
          memory.assign(8, static_cast<float>(step + 10 * number + rank));
          operations.push_back(
              submit_one(job.rank(static_cast<int>(rank)), float_operation(memory, "")));
        }
        for (int round = 0; round < rounds_between; ++round) {
          job.rank(round % 2).step();
          clock.advance(std::chrono::microseconds(1));
        }
      }
      ASSERT_TRUE(job.run_until(clock, seconds(1),
                                [&] {
                                  return std::all_of(
                                      operations.begin(), operations.end(),
                                      [](const Operation& operation) { return operation.done(); });
                                }))
          << "one was lost in step " << step << ", " << rounds_between << " rounds apart";
      for (std::size_t i = 0; i < operations.size(); ++i) {
        EXPECT_TRUE(operations[i].status().ok()) << operations[i].status().message;
        EXPECT_EQ(data[i][7], static_cast<float>(2 * step + 20 * (i / 2) + 1));
      }
      if (step == 19) {
        EXPECT_GT(job.rank(0).metrics().locked_operations, 0U);
      }
    }
  }
}

// The members have two types, so they run in two batches, with another operation in between.
TEST(Locked, AGroupInSeveralBatchesIsNotLeftHalfDone) {
  Ranks ranks(2);
  std::vector<std::vector<float>> data(6);
  const auto submit = [&](std::size_t rank, std::size_t number, Submission named) {
    std::vector<float>& memory = data[2 * number + rank];
    memory.assign(8, static_cast<float>(rank + 1));
    Submission submission = float_operation(memory, named.name);
    submission.parameters = named.parameters;
    submission.group = named.group;
    submission.group_size = named.group.empty() ? 0 : 2;
    submission.group_index = named.group_index;
    ranks.submit(static_cast<int>(rank), std::move(submission));
  };
  const auto submit_member = [&](std::size_t rank, int index) {
    const Allreduce how{.op = index == 0 ? ReduceOp::kSum : ReduceOp::kMax};
    submit(rank, static_cast<std::size_t>(index),
           {.name = "member" + std::to_string(index),
            .parameters = how,
            .group = "group",
            .group_index = index});
  };
  for (int step = 0; step < 20; ++step) {
    const bool deviates = step > 10 && step % 3 == 0;
    for (const std::size_t rank : {0, 1}) submit_member(rank, 0);
    if (deviates) ranks.step_a_while();
    for (const std::size_t rank : {0, 1}) {
      if (deviates) submit(rank, 2, {.name = "else", .parameters = Allreduce{}});
      submit_member(rank, 1);
    }
    for (const Operation& operation : ranks.run())
      ASSERT_TRUE(operation.status().ok()) << "step " << step << ": " << operation.status().message;
    EXPECT_EQ(data[0][7], 3.0F);
    EXPECT_EQ(data[2][7], 2.0F);
  }
}

TEST(Locked, AWorkThatCannotBeUsedAgainIsNotKept) {
  VirtualClock clock;
  LocalJobOptions options = stepped(2);
  const auto backend = std::make_shared<CountedBackend>();
  options.backend = backend;
  LocalJob job(options, clock);
  std::vector<std::vector<float>> data(2, std::vector<float>(8, 1));
  for (int step = 0; step < 12; ++step) {
    std::vector<Operation> operations;
    for (int rank = 0; rank < 2; ++rank)
      operations.push_back(
          submit_one(job.rank(rank), float_operation(data[static_cast<std::size_t>(rank)], "w")));
    ASSERT_TRUE(job.run_until(clock, seconds(1),
                              [&] { return operations[0].done() && operations[1].done(); }));
  }
  EXPECT_GT(job.rank(0).metrics().locked_operations, 0U);
  EXPECT_EQ(backend->live(), 0);
}

// A repeated operation takes a shorter path, which must refuse the same submissions.
TEST(Reuse, OfANameWithAnOutputThatOverlapsTheInputOtherwiseIsRefused) {
  Ranks ranks(2);
  std::vector<float> memory(9, 1);
  std::vector<float> elsewhere(8);
  std::vector<float> other(8, 2);
  const auto use = [&](float* output) {
    Submission submission = float_operation(memory, "w");
    submission.input.count = submission.output.count = 8;
    submission.input.shape = submission.output.shape = {8};
    submission.output.data = reinterpret_cast<std::byte*>(output);
    ranks.submit(0, std::move(submission));
    ranks.submit(1, float_operation(other, "w"));
    for (const Operation& operation : ranks.run())
      EXPECT_TRUE(operation.status().ok()) << operation.status().message;
  };
  use(memory.data());
  EXPECT_THROW(use(memory.data() + 1), UsageError);
  use(elsewhere.data());
  EXPECT_THROW(use(memory.data() + 1), UsageError);
  use(memory.data());
  EXPECT_THAT(memory, ElementsAre(9, 9, 9, 9, 9, 9, 9, 9, 1));
}

TEST(Groups, AnUnnamedOneOfTwoKindsIsRefusedAtOnce) {
  Ranks ranks(2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  const auto group = [&](std::size_t rank, bool named) {
    std::vector<Submission> members = {
        float_operation(data[rank], named ? "a" : ""),
        float_operation(data[rank], named ? "b" : "", OpKind::kBroadcast)};
    for (int i = 0; i < 2; ++i) {
      members[static_cast<std::size_t>(i)].group = named ? "both" : "";
      members[static_cast<std::size_t>(i)].group_size = 2;
      members[static_cast<std::size_t>(i)].group_index = i;
    }
    return members;
  };
  for (std::size_t rank = 0; rank < 2; ++rank) {
    ranks.submit(static_cast<int>(rank), float_operation(data[rank], "", OpKind::kBroadcast));
  }
  ranks.run();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THROW(ranks.rank(rank).submit(group(static_cast<std::size_t>(rank), false),
                                         Progress::kBackground),
                 UsageError);
  }
  // With names it is a group like any other, though not in one batch.
  std::vector<Operation> operations;
  for (int rank = 0; rank < 2; ++rank) {
    for (Operation& operation : ranks.rank(rank).submit(group(static_cast<std::size_t>(rank), true),
                                                        Progress::kBackground))
      operations.push_back(std::move(operation));
  }
  ranks.step_a_while();
  for (const Operation& operation : operations) {
    ASSERT_TRUE(operation.done());
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
  }
}

TEST(Groups, AnUnnamedOneThatBeginsInTheMiddleIsRefused) {
  Ranks ranks(2);
  std::vector<float> data(1);
  Submission second = float_operation(data, "");
  second.group_size = 2;
  second.group_index = 1;
  EXPECT_THROW(submit_one(ranks.rank(1), std::move(second)), UsageError);
  for (int rank = 0; rank < 2; ++rank) ranks.submit(rank, float_operation(data, ""));
  for (const Operation& operation : ranks.run())
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
}

TEST(Names, ARefusedUnnamedOperationKeepsNoNumber) {
  Ranks ranks(2);
  std::vector<std::vector<float>> data = {{1}, {2}};
  ranks.submit(0, float_operation(data[0], "allreduce.unnamed.0"));
  EXPECT_THROW(submit_one(ranks.rank(0), float_operation(data[0], "")), UsageError);
  ranks.submit(1, float_operation(data[1], "allreduce.unnamed.0"));
  ranks.run();
  for (int rank = 0; rank < 2; ++rank)
    ranks.submit(rank, float_operation(data[static_cast<std::size_t>(rank)], ""));
  for (const Operation& operation : ranks.run())
    EXPECT_TRUE(operation.status().ok()) << operation.status().message;
}

TEST(Many, TenThousandInFlightInAnotherOrderOnEachRank) {
  constexpr int kTensors = 10'000;
  Ranks ranks(2);
  std::vector<std::vector<std::vector<float>>> data(2);
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<int> order(kTensors);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(rank)));
    auto& mine = data[static_cast<std::size_t>(rank)];
    for (int i = 0; i < kTensors; ++i) mine.push_back({static_cast<float>(i * (rank + 1))});
    for (const int i : order)
      ranks.submit(rank,
                   float_operation(mine[static_cast<std::size_t>(i)], "t" + std::to_string(i)));
  }
  for (const Operation& operation : ranks.run()) ASSERT_TRUE(operation.status().ok());
  for (int i = 0; i < kTensors; ++i)
    ASSERT_EQ(data[1][static_cast<std::size_t>(i)][0], static_cast<float>(3 * i));
}

}  // namespace
}  // namespace hvd::testing
