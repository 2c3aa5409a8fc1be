#include "torch/support/torch_test.h"

#include <hvd/memory.h>

#include <algorithm>

namespace hvd::testing {

torch::Tensor rank_tensor(int rank, at::IntArrayRef shape, torch::ScalarType type, int seed) {
  const std::int64_t count = c10::multiply_integers(shape);
  const torch::Tensor position = torch::arange(count, torch::kInt64) + 7 * seed;
  const torch::Tensor mixed = torch::remainder(position * 5 + (position + 3) * (rank + 1) * 11, 7);
  const torch::Tensor values = type == torch::kBool ? (torch::remainder(mixed, 2) == 0)
                                                    : (type == torch::kUInt8 ? mixed : mixed - 3);
  return values.to(type).reshape(shape);
}

std::vector<torch::Tensor> every_rank(at::IntArrayRef shape, torch::ScalarType type, int seed) {
  std::vector<torch::Tensor> inputs;
  for (int r = 0; r < size(); ++r) inputs.push_back(rank_tensor(r, shape, type, seed));
  return inputs;
}

torch::Tensor reference_reduce(const std::vector<torch::Tensor>& inputs, ReduceOp op) {
  const torch::ScalarType type = inputs.front().scalar_type();
  const torch::ScalarType wide = c10::isReducedFloatingType(type) ? torch::kFloat32 : type;
  torch::Tensor result = inputs.front().to(wide).clone();
  for (std::size_t r = 1; r < inputs.size(); ++r) {
    const torch::Tensor next = inputs[r].to(wide);
    switch (op) {
      case ReduceOp::kMin:
        result = torch::minimum(result, next);
        break;
      case ReduceOp::kMax:
        result = torch::maximum(result, next);
        break;
      case ReduceOp::kProduct:
        result = type == torch::kBool ? torch::logical_and(result, next) : result * next;
        break;
      default:
        result = type == torch::kBool ? torch::logical_or(result, next) : result + next;
    }
  }
  const auto count = static_cast<std::int64_t>(inputs.size());
  if (is_average(op)) {
    result = c10::isFloatingType(type) ? result / count : result.div(count, "trunc");
  }
  return result.to(type);
}

::testing::AssertionResult near(const torch::Tensor& actual, const torch::Tensor& expected,
                                double tolerance) {
  if (!actual.defined()) return ::testing::AssertionFailure() << "undefined tensor";
  if (actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure()
           << "shape " << actual.sizes() << ", expected " << expected.sizes();
  }
  if (actual.scalar_type() != expected.scalar_type()) {
    return ::testing::AssertionFailure()
           << "dtype " << actual.dtype() << ", expected " << expected.dtype();
  }
  const torch::NoGradGuard no_grad;
  const bool equal = c10::isFloatingType(actual.scalar_type())
                         ? torch::allclose(actual, expected, tolerance, tolerance)
                         : torch::equal(actual, expected);
  if (equal) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "got\n" << actual << "\nexpected\n" << expected;
}

::testing::AssertionResult same_on_all_ranks(const torch::Tensor& tensor) {
  const torch::Tensor row = tensor.detach().contiguous().reshape({1, -1}).view(torch::kUInt8);
  const torch::Tensor all = allgather(row, {.name = "test.same_on_all_ranks"});
  for (std::int64_t r = 1; r < all.size(0); ++r) {
    if (!torch::equal(all[r], all[0])) {
      return ::testing::AssertionFailure() << "ranks 0 and " << r << " hold different bytes";
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult same_on_all_ranks(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> flat;
  for (const torch::Tensor& tensor : tensors) flat.push_back(tensor.detach().reshape(-1));
  return same_on_all_ranks(torch::cat(flat));
}

void for_each_set(const std::function<void(const ProcessSet&)>& test) {
  test({});
  if (size() == 1) return;
  const ProcessSet set = add_process_set(size() == 2 ? std::vector{1} : std::vector{0, 2});
  if (set.included()) {
    SCOPED_TRACE("in process set " + std::to_string(set.id()));
    // The other ranks wait for this rank below, so an exception must not skip it.
    try {
      test(set);
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
  remove_process_set(set);
}

std::vector<torch::Tensor> every_member(const ProcessSet& set, at::IntArrayRef shape,
                                        torch::ScalarType type, int seed) {
  std::vector<torch::Tensor> inputs;
  for (const int r : set.ranks()) inputs.push_back(rank_tensor(r, shape, type, seed));
  return inputs;
}

NetImpl::NetImpl(int width)
    : fc1(register_module("fc1", torch::nn::Linear(4, width))),
      fc2(register_module("fc2", torch::nn::Linear(width, 2))),
      norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))) {}

Batch Batch::of_rank(int rank, int step) {
  const auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(1000 * step + rank));
  const torch::Tensor x = torch::randn({6, 4}, generator);
  return {x, torch::stack({x.sum(1).sin(), x.prod(1)}, 1)};
}

Batch Batch::joined(int step) {
  std::vector<torch::Tensor> x, y;
  for (int r = 0; r < size(); ++r) {
    Batch batch = of_rank(r, step);
    x.push_back(batch.x);
    y.push_back(batch.y);
  }
  return {torch::cat(x), torch::cat(y)};
}

torch::Tensor loss_of(Net& net, const Batch& batch) {
  return torch::mse_loss(net->forward(batch.x), batch.y);
}

void copy_values(const torch::nn::Module& from, torch::nn::Module& to) {
  const torch::NoGradGuard no_grad;
  const auto values = from.parameters();
  const auto targets = to.parameters();
  for (std::size_t i = 0; i < values.size(); ++i) targets[i].detach().copy_(values[i]);
}

Net same_net(torch::ScalarType type) {
  torch::manual_seed(41);
  Net net;
  net->to(type);
  broadcast_parameters(net);
  return net;
}

void backward(Net& net, int step) {
  const Batch batch = Batch::of_rank(rank(), step);
  const auto type = net->fc1->weight.scalar_type();
  torch::mse_loss(net->forward(batch.x.to(type)), batch.y.to(type)).backward();
}

bool in_shared_memory(const torch::Tensor& tensor) {
  return is_shared(tensor.const_data_ptr(), std::max<std::size_t>(tensor.nbytes(), 1));
}

}  // namespace hvd::testing
