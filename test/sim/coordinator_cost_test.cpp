// Measures and prints the cost of the coordinator, and checks it against a generous upper bound.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// 161 is the number of parameters of a ResNet-50.
TEST(CoordinatorCost, ACachedStepOf161TensorsOn64Ranks) {
  constexpr int kRanks = 64;
  constexpr std::uint64_t kTensors = 161;
  constexpr int kSteps = 20;
  Cluster cluster(kRanks);
  double accepting = 0;
  double deciding = 0;
  double applying = 0;
  std::size_t report_bytes = 0;
  for (int step = 0; step <= kSteps; ++step) {
    for (std::uint64_t i = 0; i < kTensors; ++i) {
      cluster.submit_everywhere(allreduce(numbered("layer.weight.", i), {64, 64}));
    }
    std::vector<wire::Bytes> reports;
    for (int rank = 0; rank < kRanks; ++rank) reports.push_back(cluster.send(rank));
    auto start = Clock::now();
    for (int rank = 0; rank < kRanks; ++rank) {
      cluster.arrive(reports[static_cast<std::size_t>(rank)]);
    }
    const double accepted = microseconds_since(start);
    start = Clock::now();
    const auto plan = cluster.decide();
    const double decided = microseconds_since(start);
    ASSERT_TRUE(plan);
    start = Clock::now();
    cluster.apply_everywhere();
    if (step == 0) {
      std::printf(
          "first step, in full: %.0f us to accept 64 reports of %zu bytes, %.0f us to decide\n",
          accepted, reports[0].size(), decided);
      continue;
    }
    accepting += accepted / kSteps;
    deciding += decided / kSteps;
    applying += microseconds_since(start) / kSteps / kRanks;
    report_bytes = reports[0].size();
  }
  std::printf(
      "cached step: %.0f us to accept 64 reports of %zu bytes, %.0f us to decide, "
      "%.0f us per rank to apply\n",
      accepting, report_bytes, deciding, applying);
  EXPECT_EQ(report_bytes, 3u + 7 + 21 + 2);
  EXPECT_LT(accepting + deciding, 1e6);
}

}  // namespace
}  // namespace hvd::control
