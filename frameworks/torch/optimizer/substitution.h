#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace hvd::libtorch {

/// While it lives an optimizer has other parameters, and their state. Not thread-safe.
class Substitution {
 public:
  using States = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

  /// @param by_group as many as the optimizer has groups  @param states what the optimizer makes of
  /// it stays there
  Substitution(torch::optim::Optimizer& optimizer,
               std::vector<std::vector<torch::Tensor>>& by_group, States& states)
      : optimizer_(optimizer), by_group_(by_group), states_(states) {
    swap();
  }
  Substitution(const Substitution&) = delete;
  Substitution& operator=(const Substitution&) = delete;
  ~Substitution() { swap(); }

 private:
  void swap() noexcept {
    for (std::size_t g = 0; g < by_group_.size(); ++g)
      optimizer_.param_groups()[g].params().swap(by_group_[g]);
    optimizer_.state().swap(states_);
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<torch::Tensor>>& by_group_;
  States& states_;
};

}  // namespace hvd::libtorch
