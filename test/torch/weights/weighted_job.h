#pragma once

#include <cstdint>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {

/// The number of samples of a rank in a pass, from 1 to 5, which differs between ranks and passes.
inline std::int64_t samples_of(int rank, int pass) { return 1 + (3 * rank + 2 * pass) % 5; }

inline Batch unequal_batch(int rank, int pass) {
  const Batch batch = Batch::of_rank(rank, pass);
  const std::int64_t samples = samples_of(rank, pass);
  return {batch.x.narrow(0, 0, samples), batch.y.narrow(0, 0, samples)};
}
inline Batch own_batch(int pass) { return unequal_batch(rank(), pass); }

/// The samples of these ranks in these passes.
inline Batch joined_batch(const std::vector<int>& ranks, const std::vector<int>& passes) {
  std::vector<torch::Tensor> x, y;
  for (const int pass : passes) {
    for (const int rank : ranks) {
      const Batch batch = unequal_batch(rank, pass);
      x.push_back(batch.x);
      y.push_back(batch.y);
    }
  }
  return {torch::cat(x), torch::cat(y)};
}
inline Batch joined_batch(const std::vector<int>& passes) {
  return joined_batch(ProcessSet().ranks(), passes);
}

/// The mean loss over a batch, in the net's dtype.
inline torch::Tensor mean_loss(Net& net, const Batch& batch) {
  const auto type = net->fc1->weight.scalar_type();
  return torch::mse_loss(net->forward(batch.x.to(type)), batch.y.to(type));
}

inline ::testing::AssertionResult near_parameters(Net& actual, Net& expected,
                                                  double tolerance = 1e-5) {
  for (const auto& item : actual->named_parameters()) {
    const auto result = near(item.value(), expected->named_parameters()[item.key()], tolerance);
    if (!result) return ::testing::AssertionFailure() << item.key() << ": " << result.message();
  }
  return ::testing::AssertionSuccess();
}

}  // namespace hvd::testing
