#include "bench/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

namespace hvd::bench {
namespace {

TEST(Statistics, APercentileIsASample) {
  std::vector<double> samples(100);
  std::iota(samples.rbegin(), samples.rend(), 1);  // 100 .. 1
  EXPECT_EQ(percentile(samples, 0.0), 1);
  EXPECT_EQ(percentile(samples, 0.5), 50);
  EXPECT_EQ(percentile(samples, 0.95), 95);
  EXPECT_EQ(percentile(samples, 0.99), 99);
  EXPECT_EQ(percentile(samples, 1.0), 100);
}

TEST(Statistics, FewSamples) {
  EXPECT_TRUE(std::isnan(percentile({}, 0.5)));
  const std::vector<double> one = {7};
  EXPECT_EQ(percentile(one, 0.5), 7);
  EXPECT_EQ(percentile(one, 0.99), 7);
  const std::vector<double> three = {3, 1, 2};
  EXPECT_EQ(percentile(three, 0.5), 2);
  EXPECT_EQ(percentile(three, 0.99), 3) << "with less than a hundred samples p99 is the slowest";
  std::vector<double> twenty(20);
  std::iota(twenty.begin(), twenty.end(), 1);
  EXPECT_EQ(percentile(twenty, 0.95), 19);
}

TEST(Statistics, ASummaryAgreesWithThePercentiles) {
  std::vector<double> samples(1000);
  std::iota(samples.begin(), samples.end(), 1);
  const Summary summary = summarize(samples);
  EXPECT_EQ(summary.p50, 500);
  EXPECT_EQ(summary.p95, 950);
  EXPECT_EQ(summary.p99, 990);
  EXPECT_EQ(summary.samples, 1000u);
}

TEST(Statistics, ARatioComparesMeasurementsOfOneRound) {
  // The machine is ten times slower for a while. The ratio of the medians would be 1 / 20.
  const std::vector<double> ours = {1, 1, 1, 10, 10};
  const std::vector<double> theirs = {2, 2, 20, 20, 20};
  EXPECT_DOUBLE_EQ(median_ratio(ours, theirs), 0.5);
  EXPECT_TRUE(std::isnan(median_ratio({}, {})));
}

TEST(Statistics, ARatioOfAddedTimesLeavesOutWhereNothingWasAdded) {
  const std::vector<double> base = {10, 100, 10, 10};
  const std::vector<double> ours = {12, 120, 12, 12};
  const std::vector<double> theirs = {20, 200, 9, 10};
  EXPECT_DOUBLE_EQ(median_ratio_of_added(ours, theirs, base), 0.2);
  EXPECT_TRUE(std::isnan(median_ratio_of_added(ours, base, base)));
}

TEST(Statistics, BusFactorsAreThoseOfNcclTests) {
  EXPECT_DOUBLE_EQ(bus_factor(OpKind::kAllreduce, 2), 1.0);
  EXPECT_DOUBLE_EQ(bus_factor(OpKind::kAllreduce, 4), 1.5);
  EXPECT_DOUBLE_EQ(bus_factor(OpKind::kAllreduce, 8), 1.75);
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kReducescatter, OpKind::kAlltoall}) {
    EXPECT_DOUBLE_EQ(bus_factor(kind, 2), 0.5) << to_string(kind);
    EXPECT_DOUBLE_EQ(bus_factor(kind, 8), 0.875) << to_string(kind);
  }
  EXPECT_DOUBLE_EQ(bus_factor(OpKind::kBroadcast, 8), 1.0);
  EXPECT_DOUBLE_EQ(bus_factor(OpKind::kAllreduce, 1), 0.0) << "one rank uses no bus";
}

TEST(Statistics, RepetitionsFollowTheTimeOfOne) {
  const RepetitionLimits limits{.budget_seconds = 1, .least = 20, .most = 2000};
  EXPECT_EQ(repetitions_for(1e-6, limits), 2000);
  EXPECT_EQ(repetitions_for(0, limits), 2000);
  EXPECT_EQ(repetitions_for(std::numeric_limits<double>::min(), limits), 2000);
  EXPECT_EQ(repetitions_for(0.01, limits), 100);
  EXPECT_EQ(repetitions_for(10, limits), 20);
  EXPECT_EQ(repetitions_for(1, {.budget_seconds = 1, .least = 5, .most = 3}), 5);
}

TEST(Statistics, SizesReachTheHighest) {
  EXPECT_EQ(geometric_sizes(4, 64, 4), (std::vector<std::size_t>{4, 16, 64}));
  EXPECT_EQ(geometric_sizes(4, 63, 4), (std::vector<std::size_t>{4, 16}));
  EXPECT_EQ(geometric_sizes(8, 4, 2), std::vector<std::size_t>{});
  const std::size_t huge = std::numeric_limits<std::size_t>::max();
  EXPECT_EQ(geometric_sizes(huge / 2, huge, 4), std::vector<std::size_t>{huge / 2})
      << "no overflow";
}

}  // namespace
}  // namespace hvd::bench
