#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <hvd/accelerator.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {

/// Sample i is computed from i: 4 inputs, and a target of shape [2], as Batch has it.
class Points : public torch::data::datasets::Dataset<Points> {
 public:
  explicit Points(std::size_t size) : size_(size) {}
  torch::data::Example<> get(std::size_t index) override {
    const torch::Tensor x = torch::randn({4}, at::make_generator<at::CPUGeneratorImpl>(index));
    return {x, torch::stack({x.sum().sin(), x.prod()})};
  }
  std::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
};
inline auto points(std::size_t size) {
  return Points(size).map(torch::data::transforms::Stack<>());
}

/// Sample i is the number i.
class Numbers : public torch::data::datasets::BatchDataset<Numbers, torch::Tensor> {
 public:
  explicit Numbers(std::size_t size) : size_(size) {}
  torch::Tensor get_batch(c10::ArrayRef<std::size_t> indices) override {
    return torch::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()));
  }
  std::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
};

/// Halves the learning rate in each step.
class Halving : public torch::optim::LRScheduler {
 public:
  using LRScheduler::LRScheduler;

 private:
  std::vector<double> get_lrs() override {
    std::vector<double> rates = get_current_lrs();
    for (double& rate : rates) rate /= 2;
    return rates;
  }
};

}  // namespace hvd::testing
