#pragma once

#include <hvd/torch.h>

#include <vector>

/// Whether all ranks of the set have the same parameters, bit for bit. Collective.
inline bool equal_on_ranks(const std::vector<torch::Tensor>& parameters,
                           const hvd::ProcessSet& set = {}) {
  const torch::Tensor mine = torch::nn::utils::parameters_to_vector(parameters).detach();
  const torch::Tensor smallest =
      hvd::allreduce(mine, {.op = hvd::ReduceOp::kMin, .process_set = set});
  const torch::Tensor largest =
      hvd::allreduce(mine, {.op = hvd::ReduceOp::kMax, .process_set = set});
  return smallest.equal(largest);
}
