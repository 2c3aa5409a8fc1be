#include "support/sixteen_bit.h"

#include <random>

namespace hvd::testing {

SixteenBitAverage sixteen_bit_average(DataType type, int ranks, std::size_t count) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> numbers(0.5F, 2.0F);
  SixteenBitAverage made{{}, std::vector<double>(count)};
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::uint16_t>& values = made.inputs.emplace_back(count);
    for (std::size_t i = 0; i < count; ++i) {
      values[i] = narrowed(type, numbers(random));
      made.mean[i] += static_cast<double>(widened(type, values[i])) / ranks;
    }
  }
  return made;
}

double mean_relative_error(DataType type, std::span<const std::uint16_t> actual,
                           std::span<const double> expected) {
  double sum = 0;
  for (std::size_t i = 0; i < expected.size(); ++i)
    sum += static_cast<double>(widened(type, actual[i])) / expected[i] - 1;
  return sum / static_cast<double>(expected.size());
}

}  // namespace hvd::testing
