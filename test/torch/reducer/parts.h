#pragma once

#include <string>
#include <utility>
#include <vector>

#include "reducer/reduced_parameter.h"
#include "torch/support/torch_test.h"

namespace hvd::testing {

/// A scope that no other test uses.
inline libtorch::GradientReduction sums(const std::string& scope) {
  return {.scope = "parts." + scope, .op = ReduceOp::kSum};
}

inline libtorch::ReducedParameter reduced(const std::string& name, const torch::Tensor& tensor,
                                          const libtorch::GradientReduction& how, int group = -1) {
  libtorch::ReducedParameter parameter(name, tensor, group);
  parameter.set_scope(how);
  return parameter;
}

/// Makes parameters named "p0", "p1", ...; each is a vector of as many ones as its number.
inline std::vector<libtorch::ReducedParameter> reduced(const std::vector<std::int64_t>& numbers,
                                                       const libtorch::GradientReduction& how) {
  std::vector<libtorch::ReducedParameter> all;
  for (const std::int64_t number : numbers)
    all.push_back(reduced("p" + std::to_string(all.size()),
                          torch::ones({number}, torch::requires_grad()), how));
  return all;
}

inline void set_gradient(const libtorch::ReducedParameter& parameter, torch::Tensor gradient) {
  parameter.tensor().mutable_grad() = std::move(gradient);
}

/// The sum of (rank + 1) over all ranks.
inline float sum_of_ranks() { return static_cast<float>(size() * (size() + 1)) / 2; }

}  // namespace hvd::testing
