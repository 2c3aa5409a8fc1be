#pragma once

#include <gtest/gtest.h>
#include <hvd/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "support/message_of.h"

namespace hvd::testing {

/// Values that depend on rank, position and seed, so that every rank can compute those of any rank.
/// They are small, so that sums and products of a few are exact in each dtype.
torch::Tensor rank_tensor(int rank, at::IntArrayRef shape, torch::ScalarType type, int seed = 0);
std::vector<torch::Tensor> every_rank(at::IntArrayRef shape, torch::ScalarType type, int seed = 0);

/// The reduction in rank order; 16-bit floats in float32, rounded once.
torch::Tensor reference_reduce(const std::vector<torch::Tensor>& inputs, ReduceOp op);

/// Checks shape, dtype and values (within a few roundings for floating types).
::testing::AssertionResult near(const torch::Tensor& actual, const torch::Tensor& expected,
                                double tolerance = 1e-6);

/// Checks that every rank has the same bytes. Collective.
::testing::AssertionResult same_on_all_ranks(const torch::Tensor& tensor);
::testing::AssertionResult same_on_all_ranks(const std::vector<torch::Tensor>& tensors);

/// Runs `test` on all ranks, and then on the members of a process set that is not all of them
/// ({0, 2}, or {1} of two ranks). Collective over all ranks.
void for_each_set(const std::function<void(const ProcessSet&)>& test);

/// This rank's value among values in the order of the set.
template <class T>
const T& own_of(const std::vector<T>& values, const ProcessSet& set) {
  return values[static_cast<std::size_t>(set.rank())];
}

/// rank_tensor() of each member.
std::vector<torch::Tensor> every_member(const ProcessSet& set, at::IntArrayRef shape,
                                        torch::ScalarType type, int seed = 0);

/// A small network with different kinds of parameters.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  torch::nn::LayerNorm norm{nullptr};

  explicit NetImpl(int width = 8);
  torch::Tensor forward(torch::Tensor x) {
    return fc2->forward(norm->forward(torch::tanh(fc1->forward(x))));
  }
};
TORCH_MODULE(Net);

/// One rank's batch of a regression problem. joined() returns all ranks' samples in rank order.
struct Batch {
  torch::Tensor x, y;
  static Batch of_rank(int rank, int step);
  static Batch joined(int step);
};
torch::Tensor loss_of(Net& net, const Batch& batch);

/// Copies the values of the parameters of `from` to those of `to`.
void copy_values(const torch::nn::Module& from, torch::nn::Module& to);

/// Returns a network that is equal on all ranks.
Net same_net(torch::ScalarType type = torch::kFloat32);

/// Computes the gradients for this rank's batch of a step, in the net's dtype.
void backward(Net& net, int step = 0);

/// Trains one step with this rank's batch.
template <class Optimizer>
void train_step(Net& net, Optimizer& optimizer, int step) {
  optimizer.zero_grad();
  backward(net, step);
  optimizer.step();
}

/// Whether the tensor lies in memory that the ranks of this host share.
bool in_shared_memory(const torch::Tensor& tensor);

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace hvd::testing
