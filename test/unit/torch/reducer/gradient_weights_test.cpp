#include "reducer/gradient_weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "hvd/error.h"
#include "support/message_of.h"

namespace hvd::libtorch {
namespace {

using hvd::testing::message_of;

constexpr int kSingle = 24, kHalf = 11, kBrain = 8;

std::vector<int> ranks(int count) {
  std::vector<int> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// The number that is nearest to `value` among those with `precision` bits.
double rounded(double value, int precision) {
  if (value == 0) return 0;
  const int exponent = std::ilogb(value) - precision + 1;
  return std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
}

/// The ranks of a job, whose flags are averaged as a backend does: each number is rounded to the
/// type that is sent, additions to float32, and the result to the type again.
struct Job {
  explicit Job(int count) {
    for (int r = 0; r < count; ++r) weights.emplace_back("Optimizer", "opt0", ranks(count), r);
  }
  /// @param present the ranks that have not joined  @param prescale as gradient_predivide_factor
  void exchange(int precision, const std::vector<bool>& present, double prescale = 1) {
    std::vector<float> averages;
    int contributors = 0;
    for (std::size_t r = 0; r < weights.size(); ++r) {
      if (!present[r]) continue;
      ++contributors;
      weights[r].close(precision);
      averages.resize(weights[r].flags());
    }
    for (std::size_t i = 0; i < averages.size(); ++i) {
      float sum = 0;
      for (std::size_t r = 0; r < weights.size(); ++r) {
        if (present[r])
          sum += static_cast<float>(rounded(weights[r].flag(i) * prescale, precision));
      }
      averages[i] = static_cast<float>(rounded(sum / prescale / contributors, precision));
    }
    for (std::size_t r = 0; r < weights.size(); ++r) {
      if (present[r]) weights[r].read([&](std::size_t i) { return averages[i]; });
    }
  }
  void exchange(int precision = kSingle) {
    exchange(precision, std::vector<bool>(weights.size(), true));
  }
  void pass(std::size_t rank, std::int64_t samples) {
    weights[rank].set(samples);
    weights[rank].count_pass();
  }
  void end_cycle() {
    for (GradientWeights& one : weights) one.end_cycle();
  }

  std::vector<GradientWeights> weights;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(GradientWeightsTest, TheSumIsExactInEveryTypeAtAnyNumberOfRanks) {
  for (const int precision : {kSingle, kHalf, kBrain}) {
    for (const int count : {1, 2, 3, 7, 32, 33, 100, 1000}) {
      for (const double prescale : {1.0, 1 / 3.0}) {
        Job job(count);
        std::int64_t expected = 0;
        for (int r = 0; r < count; ++r) {
          // Every digit of the first ranks is the largest; the others have all kinds.
          const std::int64_t own =
              r < 2 ? GradientWeights::kMaxSamples - r
                    : (std::int64_t{0x9e3779b97f} * (r + 7)) % GradientWeights::kMaxSamples;
          job.pass(static_cast<std::size_t>(r), own);
          expected += own;
        }
        job.exchange(precision, std::vector<bool>(static_cast<std::size_t>(count), true), prescale);
        for (const GradientWeights& one : job.weights) {
          ASSERT_EQ(one.sum(), expected) << precision << ' ' << count << ' ' << prescale;
          EXPECT_EQ(one.error(), "");
        }
      }
    }
  }
}

TEST(GradientWeightsTest, EqualWeightsNeedNoFactor) {
  Job job(3);
  for (int cycle = 0; cycle < 2; ++cycle) {
    for (std::size_t r = 0; r < 3; ++r) job.pass(r, 48);
    job.exchange();
    EXPECT_EQ(job.weights[1].reference(), 48);
    EXPECT_TRUE(job.weights[1].agreed());
    EXPECT_EQ(job.weights[1].factor(), 1);
    EXPECT_EQ(job.weights[1].share(), 1);
    job.end_cycle();
  }
  // The reference stays.
  for (std::size_t r = 0; r < 3; ++r) job.pass(r, static_cast<std::int64_t>(8 * r));
  job.exchange();
  EXPECT_EQ(job.weights[2].reference(), 48);
  EXPECT_DOUBLE_EQ(job.weights[2].factor(), 3 * 48 / 24.0);
  EXPECT_DOUBLE_EQ(job.weights[2].share(), 2);
}

TEST(GradientWeightsTest, ARankThatHasJoinedHasNoWeightAndDelaysTheReference) {
  Job job(3);
  job.pass(0, 10);
  job.pass(2, 30);
  job.exchange(kBrain, {true, false, true});
  EXPECT_EQ(job.weights[0].sum(), 40);
  EXPECT_EQ(job.weights[0].error(), "");
  EXPECT_EQ(job.weights[0].reference(), 20);
  EXPECT_EQ(job.weights[0].factor(), 1);
  EXPECT_FALSE(job.weights[0].agreed()) << "rank 1 does not have it";
  job.end_cycle();
  for (std::size_t r = 0; r < 3; ++r) job.pass(r, 7);
  job.exchange(kBrain);
  for (const GradientWeights& one : job.weights) {
    EXPECT_EQ(one.reference(), 7);
    EXPECT_TRUE(one.agreed());
  }
}

TEST(GradientWeightsTest, PassesAddUpAndAreCountedOnce) {
  Job job(1);
  GradientWeights& weights = job.weights[0];
  job.pass(0, 5);
  weights.count_pass();  // the pass's other gradients
  EXPECT_EQ(weights.current(), 5);
  job.pass(0, 6);
  weights.count_pass();
  EXPECT_EQ(weights.current(), 6);
  job.exchange();
  EXPECT_EQ(weights.sum(), 11);
  job.end_cycle();
  // The program resets its gradients between two passes.
  job.pass(0, 5);
  weights.set(6);
  weights.forget_earlier_passes();
  weights.count_pass();
  weights.forget_earlier_passes();
  weights.count_pass();
  job.exchange();
  EXPECT_EQ(weights.sum(), 6);
}

TEST(GradientWeightsTest, ARankWithoutAPassHasTheWeightThatWasSetOrNone) {
  Job job(2);
  job.pass(0, 4);
  job.weights[1].set(3);
  job.exchange();
  EXPECT_EQ(job.weights[0].sum(), 7);
  job.end_cycle();
  for (GradientWeights& one : job.weights) one.end_cycle();  // zero_grad() ends a cycle too
  job.pass(0, 4);
  job.exchange();
  EXPECT_EQ(job.weights[0].sum(), 4);
  EXPECT_EQ(job.weights[1].error(), "");
  EXPECT_EQ(job.weights[1].share(), 0);
}

TEST(GradientWeightsTest, AWeightThatWasSetOutlivesZeroGrad) {
  Job job(1);
  job.weights[0].set(9);
  job.end_cycle();
  job.weights[0].count_pass();
  EXPECT_EQ(job.weights[0].current(), 9);
}

TEST(GradientWeightsTest, APassCountsForTheOptimizersThatItReaches) {
  Job job(1);
  GradientWeights& weights = job.weights[0];
  weights.begin_pass(4);  // of another optimizer
  weights.end_pass();
  weights.begin_pass(6);
  weights.end_cycle();  // the first gradient of a pass may end the cycle of dropped gradients
  weights.count_pass();
  weights.end_pass();
  weights.begin_pass(8);  // of another optimizer
  weights.end_pass();
  job.exchange();
  EXPECT_EQ(weights.sum(), 6);
  job.end_cycle();
  weights.begin_pass(4);
  weights.end_pass();
  job.exchange();
  EXPECT_EQ(weights.sum(), 4) << "no pass has reached it";
  job.end_cycle();
  weights.begin_pass(std::nullopt);
  weights.end_pass();
  weights.count_pass();
  EXPECT_FALSE(weights.weighted());
}

TEST(GradientWeightsTest, APassWithoutSamplesDropsItsGradients) {
  Job job(1);
  EXPECT_FALSE(job.weights[0].drops_gradients());
  job.pass(0, 0);
  EXPECT_TRUE(job.weights[0].drops_gradients());
  job.pass(0, 2);
  EXPECT_FALSE(job.weights[0].drops_gradients());
}

TEST(GradientWeightsTest, RanksWithoutAWeightAreNamed) {
  Job job(4);
  for (std::size_t r = 0; r < 4; ++r) job.pass(r, 8);
  job.exchange();
  ASSERT_TRUE(job.weights[0].agreed());
  job.end_cycle();
  for (GradientWeights& one : job.weights) one.count_pass();
  job.exchange();
  EXPECT_EQ(job.weights[0].error(), "") << "no rank has a weight";
  EXPECT_EQ(job.weights[0].factor(), 1);
  job.end_cycle();
  job.pass(0, 8);
  job.pass(3, 8);
  job.weights[1].count_pass();
  job.weights[2].count_pass();
  for (const int precision : {kSingle, kBrain}) {
    job.exchange(precision);
    for (const GradientWeights& one : job.weights) {
      const std::string message = message_of<MismatchError>([&] { one.raise_if_error(); });
      EXPECT_TRUE(contains(message,
                           "Optimizer (opt0): ranks 1 and 2 have set no weight for this step, and "
                           "ranks 0 and 3 have; expected set_weight()"))
          << message;
    }
  }
}

TEST(GradientWeightsTest, WrongWeightsAreRefused) {
  Job job(2);
  GradientWeights& weights = job.weights[1];
  EXPECT_TRUE(contains(message_of<UsageError>([&] { weights.set(-3); }),
                       "from 0 to 2^40, got -3 on rank 1"));
  EXPECT_THROW(weights.set(GradientWeights::kMaxSamples + 1), UsageError);
  job.pass(1, GradientWeights::kMaxSamples);
  weights.set(1);
  EXPECT_THROW(weights.count_pass(), UsageError) << "the sum is too large";
  job = Job(2);
  job.weights[0].count_pass();
  job.weights[0].set(3);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { job.weights[0].count_pass(); }),
                       "after a backward pass without one in the same step on rank 0"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { job.weights[0].refuse_late(); }),
                       "set_weight() was called after the backward pass of this step on rank 0"));
  job = Job(2);
  job.pass(0, 3);
  job.weights[0].begin_pass(std::nullopt);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { job.weights[0].count_pass(); }),
                       "a backward pass without a weight follows one with a weight"));
  job.weights[1].set(3);
  EXPECT_TRUE(contains(message_of<UsageError>([&] { job.weights[1].begin_pass(std::nullopt); }),
                       "expected backward(loss, {.weight = n})"));
  job = Job(2);
  job.pass(0, 0);
  job.pass(1, 0);
  job.exchange();
  EXPECT_TRUE(contains(message_of<UsageError>([&] { job.weights[1].raise_if_error(); }),
                       "the weights of all ranks are 0"));
  EXPECT_EQ(job.weights[1].factor(), 1);
}

}  // namespace
}  // namespace hvd::libtorch
