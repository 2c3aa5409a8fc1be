#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/report.h"

namespace hvd::bench {

using Shape = std::vector<std::int64_t>;

/// The shapes of a model's parameters, in the order in which the model declares them. Backward
/// computes the last gradient first.
struct ParameterSet {
  std::string name;
  std::vector<Shape> shapes;

  std::int64_t elements() const;
};

/// "resnet50": ResNet-50. "gpt2": the smallest GPT-2, its output layer tied to its embedding.
/// "small1000": 1000 times 1 KiB. "mnist": the example's network. "tiny": awkward sizes for tests.
std::vector<std::string> parameter_set_names();
/// @throws std::invalid_argument for another name
ParameterSet parameter_set(const std::string& name);
/// Returns {"resnet50": [[64, 3, 7, 7], ...], ...}, for peers in other languages.
Json all_parameter_sets();

}  // namespace hvd::bench
