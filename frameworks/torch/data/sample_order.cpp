#include "hvd/torch/sample_order.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "data/reproducible.h"
#include "hvd/error.h"

namespace hvd {
namespace {

using libtorch::mix;

constexpr std::size_t kBatchesInPool = 50;

/// The numbers 0 to n - 1 in an order that depends only on the key, on every machine.
std::vector<std::size_t> permutation(std::size_t n, std::uint64_t key) {
  std::vector<std::pair<std::uint64_t, std::size_t>> keyed(n);
  for (std::size_t i = 0; i < n; ++i) keyed[i] = {mix(key ^ i), i};
  std::sort(keyed.begin(), keyed.end());
  std::vector<std::size_t> order(n);
  for (std::size_t i = 0; i < n; ++i) order[i] = keyed[i].second;
  return order;
}

std::uint64_t key_of(std::uint64_t seed, std::size_t epoch) {
  return mix(mix(seed) ^ static_cast<std::uint64_t>(epoch));
}

}  // namespace

SampleOrder weighted_order(std::vector<double> weights, std::size_t samples, std::uint64_t seed) {
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] >= 0 && std::isfinite(weights[i])) continue;
    throw UsageError("weighted_order: expected weights that are finite and not negative, got " +
                     std::to_string(weights[i]) + " for sample " + std::to_string(i));
  }
  std::partial_sum(weights.begin(), weights.end(), weights.begin());
  if (weights.empty() || !(weights.back() > 0) || !std::isfinite(weights.back()))
    throw UsageError("weighted_order: expected weights with a finite sum above 0");
  return [sums = std::move(weights), samples, seed](std::size_t epoch) {
    const std::uint64_t key = key_of(seed, epoch);
    // The last sample with a weight above 0. Rounding must not select a later one.
    const auto end = std::lower_bound(sums.begin(), sums.end(), sums.back());
    std::vector<std::size_t> order(samples);
    for (std::size_t i = 0; i < samples; ++i) {
      constexpr int kUnused = 11;  // a double has a mantissa of 53 bits
      const double uniform = std::ldexp(static_cast<double>(mix(key ^ i) >> kUnused), kUnused - 64);
      order[i] = static_cast<std::size_t>(
          std::upper_bound(sums.begin(), end, uniform * sums.back()) - sums.begin());
    }
    return order;
  };
}

SampleOrder order_by_length(std::vector<std::size_t> lengths, std::size_t batch,
                            std::uint64_t seed) {
  if (batch == 0) throw UsageError("order_by_length: batch: expected at least 1, got 0");
  return [lengths = std::move(lengths), batch, seed](std::size_t epoch) {
    const std::uint64_t key = key_of(seed, epoch);
    std::vector<std::size_t> shuffled = permutation(lengths.size(), key);
    const std::size_t full = shuffled.size() / batch * batch;
    const std::size_t pool = batch * kBatchesInPool;
    for (std::size_t begin = 0; begin < full; begin += pool) {
      const std::size_t end = std::min(begin + pool, full);
      std::stable_sort(shuffled.begin() + static_cast<std::ptrdiff_t>(begin),
                       shuffled.begin() + static_cast<std::ptrdiff_t>(end),
                       [&](std::size_t a, std::size_t b) { return lengths[a] < lengths[b]; });
    }
    std::vector<std::size_t> order;
    order.reserve(shuffled.size());
    for (const std::size_t which : permutation(full / batch, mix(key))) {
      const auto first = shuffled.begin() + static_cast<std::ptrdiff_t>(which * batch);
      order.insert(order.end(), first, first + static_cast<std::ptrdiff_t>(batch));
    }
    order.insert(order.end(), shuffled.begin() + static_cast<std::ptrdiff_t>(full), shuffled.end());
    return order;
  };
}

}  // namespace hvd
