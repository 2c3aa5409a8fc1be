#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {

/// An optimizer that a program defines. It uses the norm of a whole gradient, so it would update
/// parts of parameters differently.
class NormalizedSgd final : public torch::optim::Optimizer {
 public:
  NormalizedSgd(std::vector<torch::Tensor> parameters, double lr)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(lr)) {}

  torch::Tensor step(LossClosure closure = nullptr) override {
    const torch::NoGradGuard no_grad;
    torch::Tensor loss;
    if (closure) {
      const torch::AutoGradMode enable(true);
      loss = closure();
    }
    for (auto& group : param_groups()) {
      for (torch::Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) update(parameter, group.options().get_lr());
      }
    }
    return loss;
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<torch::optim::SGDParamState, torch::optim::SGDOptions>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<torch::optim::SGDParamState, torch::optim::SGDOptions>(archive, *this);
  }

 private:
  void update(torch::Tensor& parameter, double lr) {
    auto& known = state()[parameter.unsafeGetTensorImpl()];
    if (!known) {
      auto fresh = std::make_unique<torch::optim::SGDParamState>();
      fresh->momentum_buffer(torch::zeros_like(parameter));
      known = std::move(fresh);
    }
    torch::Tensor& buffer = static_cast<torch::optim::SGDParamState&>(*known).momentum_buffer();
    buffer.mul_(0.9).add_(parameter.grad() / (parameter.grad().norm() + 0.1));
    parameter.detach().add_(buffer, -lr);
  }
};

}  // namespace hvd::testing
