#include "hvd/torch/metric.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "hvd/error.h"
#include "torch/support/torch_test.h"

// Metrics of ranks with different numbers of batches.

namespace hvd::testing {
namespace {

using Kind = Metric::Kind;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Rank r has r batches, the i-th of i + 1 samples; rank 0 has no batch.
template <class Act>
void for_each_batch(int rank, const Act& act) {
  for (int i = 0; i < rank; ++i) act(10.0 * rank + i, i + 1);
}

TEST(Metric, MeansAndSumsAreWeightedOverAllRanks) {
  for_each_set([](const ProcessSet& set) {
    Metric mean("mean", Kind::kMean, set), sum("sum", Kind::kSum, set);
    for_each_batch(rank(), [&](double value, int samples) {
      mean.update(value, samples);
      sum.update(value, samples);
    });
    mean.update(3.5, 1);
    sum.update(3.5, 1);
    double total = 0, weights = 0;
    for (const int r : set.ranks()) {
      total += 3.5;
      weights += 1;
      for_each_batch(r, [&](double value, int samples) {
        total += value * samples;
        weights += samples;
      });
    }
    EXPECT_DOUBLE_EQ(mean.compute(), total / weights);
    EXPECT_DOUBLE_EQ(sum.compute(), total);
    EXPECT_DOUBLE_EQ(sum.compute(), total) << "compute() has changed the metric";
  });
}

TEST(Metric, MinimaAndMaximaOverAllRanks) {
  Metric least("least", Kind::kMin), most("most", Kind::kMax);
  for (Metric* const metric : {&least, &most}) {
    metric->update(5.0 - rank());
    metric->update(5.0 + 2 * rank(), 0.25);
    metric->update(-1000, 0);
    metric->update(1000, 0);
  }
  EXPECT_EQ(least.compute(), 5.0 - (size() - 1));
  EXPECT_EQ(most.compute(), 5.0 + 2 * (size() - 1));
}

TEST(Metric, TensorsCountElementByElement) {
  Metric accuracy("accuracy"), most("most", Kind::kMax);
  double total = 0, count = 0;
  for (int r = 0; r < size(); ++r) {
    const torch::Tensor values = torch::arange(r + 1) + 100 * r;
    if (r == rank()) {
      accuracy.update(values.to(torch::kFloat32).requires_grad_());
      accuracy.update(torch::empty({0}));
      most.update(values.reshape({1, -1}));
    }
    total += values.sum().item<double>();
    count += static_cast<double>(values.numel());
  }
  EXPECT_DOUBLE_EQ(accuracy.compute(), total / count);
  EXPECT_EQ(most.compute(), 101.0 * (size() - 1));
}

// 2^24 + 1 has no representation as float32.
TEST(Metric, AddsUpInFloat64) {
  Metric sum("sum", Kind::kSum);
  sum.update(torch::full({}, 16777216.0F));
  sum.update(torch::ones({1}));
  EXPECT_EQ(sum.compute(), 16777217.0 * size());
}

TEST(Metric, WithoutValuesAndAfterReset) {
  Metric mean("a"), sum("b", Kind::kSum), least("c", Kind::kMin), most("d", Kind::kMax);
  for (int round = 0; round < 2; ++round) {
    SCOPED_TRACE(round);
    EXPECT_TRUE(std::isnan(mean.compute()));
    EXPECT_EQ(sum.compute(), 0);
    EXPECT_EQ(least.compute(), kInfinity);
    EXPECT_EQ(most.compute(), -kInfinity);
    for (Metric* const metric : {&mean, &sum, &least, &most}) {
      if (rank() == size() - 1) metric->update(7);
      EXPECT_EQ(metric->compute(), 7);
      metric->reset();
    }
  }
}

TEST(Metric, ANanOfOneRankShowsOnAll) {
  for (const Kind kind : {Kind::kMean, Kind::kSum, Kind::kMin, Kind::kMax}) {
    Metric metric("nan", kind);
    metric.update(rank());
    if (rank() == size() - 1) metric.update(std::nan(""));
    metric.update(rank() + 0.5);
    EXPECT_TRUE(std::isnan(metric.compute()));
  }
}

TEST(Metric, RefusesValuesThatItCannotCount) {
  EXPECT_THROW(Metric(""), UsageError);
  Metric metric("accuracy");
  EXPECT_TRUE(contains(message_of<UsageError>([&] { metric.update(1, -1); }),
                       "Metric 'accuracy': expected a weight"));
  EXPECT_THROW(metric.update(1, kInfinity), UsageError);
  EXPECT_THROW(metric.update(1, std::nan("")), UsageError);
  EXPECT_THROW(metric.update(torch::Tensor()), UsageError);
  EXPECT_THROW(metric.update(torch::ones({1}, torch::kComplexFloat)), UsageError);
  EXPECT_TRUE(std::isnan(metric.compute())) << "no value has been added";
}

}  // namespace
}  // namespace hvd::testing
