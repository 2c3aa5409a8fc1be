#include <string>
#include <vector>

#include "hvd/torch/sync_batch_norm.h"
#include "torch/support/cuda_test.h"

// SyncBatchNorm on a GPU, simulated or (in test/gpu) real, against LibTorch's BatchNorm on the CPU
// and the joined batch.

namespace hvd::testing {
namespace {

using CudaLayers = CudaTest;

std::vector<torch::Tensor> batches(at::IntArrayRef rest, int seed, bool some_empty) {
  std::vector<torch::Tensor> parts;
  for (int r = 0; r < size(); ++r) {
    std::vector<std::int64_t> shape = rest.vec();
    shape.insert(shape.begin(), {some_empty && r % 2 == 0 && size() > 1 ? 0 : r + 2, 3});
    parts.push_back(rank_tensor(r, shape, torch::kFloat32, seed) + r);
  }
  return parts;
}

torch::Tensor own_rows(const torch::Tensor& whole, const std::vector<torch::Tensor>& parts) {
  std::int64_t first = 0;
  for (int r = 0; r < rank(); ++r) first += parts[static_cast<std::size_t>(r)].size(0);
  return whole.narrow(0, first, own_of(parts, ProcessSet()).size(0));
}

void check(bool some_empty, torch::ScalarType type, double tolerance) {
  SyncBatchNorm2d layer(3);
  torch::nn::BatchNorm2d reference(3);
  layer->to(device());
  for (int step = 0; step < 3; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const auto parts = batches({4, 5}, step, some_empty);
    const auto x = own_of(parts, ProcessSet()).to(device()).to(type).requires_grad_();
    const auto whole = torch::cat(parts).requires_grad_();
    layer->zero_grad();
    reference->zero_grad();
    const torch::Tensor y = layer->forward(x);
    y.to(torch::kFloat32).pow(3).sum().backward();
    const torch::Tensor expected = reference->forward(whole);
    expected.pow(3).sum().backward();
    EXPECT_EQ(y.device(), device());
    EXPECT_TRUE(near(y.cpu().to(torch::kFloat32), own_rows(expected, parts).detach(), tolerance));
    EXPECT_TRUE(near(x.grad().cpu().to(torch::kFloat32), own_rows(whole.grad(), parts), tolerance));
    const torch::Tensor sum = allreduce(layer->weight.grad(), {.op = ReduceOp::kSum});
    EXPECT_TRUE(near(sum.cpu(), reference->weight.grad(), tolerance * 10));
    EXPECT_TRUE(near(layer->running_mean.cpu(), reference->running_mean, 1e-5));
    EXPECT_TRUE(near(layer->running_var.cpu(), reference->running_var, 1e-5));
  }
}

TEST_F(CudaLayers, SyncBatchNormEqualsBatchNormOnTheJoinedBatch) {
  check(false, torch::kFloat32, 2e-4);
  check(true, torch::kFloat32, 2e-4);
  check(false, torch::kBFloat16, 6e-2);
}

}  // namespace
}  // namespace hvd::testing
