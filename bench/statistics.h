#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <vector>

#include "hvd/types.h"

namespace hvd::bench {

/// Returns the smallest sample that at least `share` (0..1) of the samples do not exceed
/// (nearest-rank method). NaN without samples.
double percentile(std::span<const double> samples, double share);

struct Summary {
  double p50 = 0;
  double p95 = 0;
  double p99 = 0;
  std::size_t samples = 0;
};
Summary summarize(std::span<const double> samples);

/// Returns the median of ours[i] / theirs[i], which were measured one after the other. A slow
/// period of the machine affects both, so this is steadier than the ratio of two medians. NaN
/// without samples.
/// @pre equal sizes
double median_ratio(std::span<const double> ours, std::span<const double> theirs);

/// Returns the median of (ours[i] - base[i]) / (theirs[i] - base[i]) over the repetitions with
/// theirs[i] > base[i]. NaN if there is no such repetition.
/// @pre equal sizes
double median_ratio_of_added(std::span<const double> ours, std::span<const double> theirs,
                             std::span<const double> base);

/// Returns bus bandwidth / algorithm bandwidth, as nccl-tests define it. The bus bandwidth is the
/// load of each link, so it is comparable for any number of ranks.
double bus_factor(OpKind kind, int ranks);

struct RepetitionLimits {
  double budget_seconds = 1.0;
  int least = 20;
  int most = 2000;
};
/// Returns as many repetitions as the budget allows, within the limits.
int repetitions_for(double seconds_each, const RepetitionLimits& limits);

/// Sizes from `lowest`, each `factor` times the one before, up to and including `highest`.
/// @pre factor >= 2
std::vector<std::size_t> geometric_sizes(std::size_t lowest, std::size_t highest,
                                         std::size_t factor);

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace hvd::bench
