#pragma once

#include <gtest/gtest.h>
#include <hvd/torch.h>
#include <torch/script.h>

namespace hvd::testing {

/// A linear layer and a buffer, exported as Python would export it.
inline torch::jit::Module script_net(int seed) {
  torch::manual_seed(seed);
  torch::jit::Module net("ScriptNet");
  net.register_parameter("weight", torch::randn({2, 3}).requires_grad_(), /*is_buffer=*/false);
  net.register_parameter("bias", torch::randn({2}).requires_grad_(), /*is_buffer=*/false);
  net.register_buffer("running_mean", torch::full({2}, seed, torch::kFloat));
  net.define(R"(
    def forward(self, x):
        return torch.linear(x, self.weight, self.bias)
  )");
  return net;
}

/// The same module in C++.
struct ScriptTwinImpl : torch::nn::Module {
  torch::Tensor weight = register_parameter("weight", torch::zeros({2, 3}));
  torch::Tensor bias = register_parameter("bias", torch::zeros({2}));
  torch::Tensor mean = register_buffer("running_mean", torch::zeros({2}));
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight, bias); }
};
TORCH_MODULE(ScriptTwin);

/// Checks that the two have the same values.
inline ::testing::AssertionResult same_values(const torch::jit::Module& one,
                                              const ScriptTwin& other) {
  const StateDict tensors(one), others(other);
  if (tensors.tensors().size() != others.tensors().size())
    return ::testing::AssertionFailure() << "the numbers of tensors differ";
  for (const auto& [name, tensor] : tensors.tensors()) {
    bool equal = false;
    for (const auto& [other_name, other_tensor] : others.tensors())
      equal = equal || (name == other_name && tensor.equal(other_tensor));
    if (!equal) return ::testing::AssertionFailure() << name << " differs";
  }
  return ::testing::AssertionSuccess();
}

}  // namespace hvd::testing
