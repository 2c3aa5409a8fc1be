#include "bench/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace hvd::bench {
namespace {

double sorted_percentile(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) return std::numeric_limits<double>::quiet_NaN();
  // The tolerance makes 0.95 * 20 select the 19th value, although the product is slightly above 19
  // in binary.
  const double place = std::ceil(share * static_cast<double>(sorted.size()) - 1e-9);
  const auto last = static_cast<double>(sorted.size());
  return sorted[static_cast<std::size_t>(std::clamp(place, 1.0, last)) - 1];
}

std::vector<double> sort(std::span<const double> samples) {
  std::vector<double> sorted(samples.begin(), samples.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

}  // namespace

double percentile(std::span<const double> samples, double share) {
  return sorted_percentile(sort(samples), share);
}

Summary summarize(std::span<const double> samples) {
  const std::vector<double> sorted = sort(samples);
  return {sorted_percentile(sorted, 0.50), sorted_percentile(sorted, 0.95),
          sorted_percentile(sorted, 0.99), sorted.size()};
}

double median_ratio(std::span<const double> ours, std::span<const double> theirs) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < std::min(ours.size(), theirs.size()); ++i)
    ratios.push_back(ours[i] / theirs[i]);
  return percentile(ratios, 0.5);
}

double median_ratio_of_added(std::span<const double> ours, std::span<const double> theirs,
                             std::span<const double> base) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < base.size(); ++i) {
    const double added = theirs[i] - base[i];
    if (added > 0) ratios.push_back((ours[i] - base[i]) / added);
  }
  return percentile(ratios, 0.5);
}

double bus_factor(OpKind kind, int ranks) {
  const double n = ranks;
  switch (kind) {
    case OpKind::kAllreduce:
      return 2 * (n - 1) / n;
    case OpKind::kAllgather:
    case OpKind::kReducescatter:
    case OpKind::kAlltoall:
      return (n - 1) / n;
    default:
      return 1;
  }
}

int repetitions_for(double seconds_each, const RepetitionLimits& limits) {
  const double affordable = limits.budget_seconds / std::max(seconds_each, 1e-9);
  // Compared as doubles: the quotient may be more than an int holds.
  return static_cast<int>(std::clamp(affordable, static_cast<double>(limits.least),
                                     static_cast<double>(std::max(limits.least, limits.most))));
}

std::vector<std::size_t> geometric_sizes(std::size_t lowest, std::size_t highest,
                                         std::size_t factor) {
  std::vector<std::size_t> sizes;
  for (std::size_t size = std::max<std::size_t>(1, lowest); size <= highest; size *= factor) {
    sizes.push_back(size);
    if (size > highest / factor) break;
  }
  return sizes;
}

}  // namespace hvd::bench
