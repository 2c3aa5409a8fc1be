// Training with LibTorch on a real GPU, which several ranks may share. This program also contains
// test/torch/cuda_operations_test.cpp and cuda_c10d_test.cpp, which test the operations and the
// backend of torch.distributed.
#include <cuda_runtime_api.h>
#include <hvd/torch.h>

#include <vector>

#include "gpu/nccl_host_id.h"
#include "hvd/error.h"
#include "torch/support/cuda_test.h"

namespace hvd::testing {
namespace {

// Runs before main(), which calls hvd::init().
[[maybe_unused]] const bool host_id_is_set = [] {
  set_nccl_host_id();
  return true;
}();

using GpuTraining = CudaTest;

/// Returns the parameters after some steps: with the other ranks, each on its own batch, or alone
/// on the batches of all ranks.
std::vector<torch::Tensor> trained(torch::Device on, bool together,
                                   const DistributedOptimizerOptions& options) {
  torch::manual_seed(3);
  Net net(16);
  net->to(on);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  std::unique_ptr<DistributedOptimizer> optimizer;
  if (together)
    optimizer = std::make_unique<DistributedOptimizer>(sgd, net->named_parameters(), options);
  for (int step = 0; step < 8; ++step) {
    const Batch batch = together ? Batch::of_rank(rank(), step) : Batch::joined(step);
    together ? optimizer->zero_grad() : sgd.zero_grad();
    torch::mse_loss(net->forward(batch.x.to(on)), batch.y.to(on)).backward();
    together ? optimizer->step() : sgd.step();
  }
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : net->parameters())
    values.push_back(parameter.detach().cpu());
  return values;
}

void expect_as_one_process(const DistributedOptimizerOptions& options, double tolerance) {
  const std::vector<torch::Tensor> alone = trained(torch::kCPU, false, {});
  const std::vector<torch::Tensor> together = trained(device(), true, options);
  for (std::size_t i = 0; i < alone.size(); ++i)
    EXPECT_TRUE(near(together[i], alone[i], tolerance)) << "parameter " << i;
  EXPECT_TRUE(same_on_all_ranks(together));
}

TEST_F(GpuTraining, Buckets) { expect_as_one_process({}, 1e-3); }
TEST_F(GpuTraining, WithoutBuckets) {
  expect_as_one_process({.gradient_as_bucket_view = false}, 1e-3);
}
TEST_F(GpuTraining, BFloat16OnTheWire) {
  expect_as_one_process({.compression = Compression::kBFloat16}, 3e-2);
}

TEST_F(GpuTraining, SideStreams) {
  for (int round = 0; round < 50; ++round) {
    Handle handle;
    {
      const c10::StreamGuard a(side_stream());
      const torch::Tensor work = torch::randn({512, 512}, device());
      const torch::Tensor ones = (work.mm(work) * 0 + 1).reshape({-1});
      handle = allreduce_async(ones, {.name = "side", .op = ReduceOp::kSum});
    }
    const c10::StreamGuard b(side_stream());
    EXPECT_TRUE(on_gpu(handle.wait(), torch::full({512 * 512}, static_cast<float>(size()))));
  }
}

TEST_F(GpuTraining, ScalerSkipsOnEveryRank) {
  torch::Tensor weight = torch::ones({4}, device()).requires_grad_();
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(0.5));
  NamedParameters named;
  named.insert("weight", weight);
  DistributedOptimizer optimizer(sgd, named);
  GradScaler scaler({.init_scale = 64});
  for (int i = 0; i < 4; ++i) {
    optimizer.zero_grad();
    const double factor = i == 2 && rank() == 0 ? std::numeric_limits<double>::infinity() : 1;
    scaler.scale((weight * factor).sum()).backward();
    EXPECT_EQ(scaler.step(optimizer), i != 2);
    scaler.update();
  }
  EXPECT_TRUE(on_gpu(weight.detach(), torch::full({4}, -0.5F)));
}

TEST_F(GpuTraining, SparseTensors) {
  // Ranks have different numbers of entries, and indices repeat.
  const auto of_rank = [](int r) {
    const torch::Tensor n = torch::arange(2 * r + 3, torch::kInt64);
    return torch::sparse_coo_tensor(
        torch::stack({(n * (r + 2)) % 6, torch::floor_divide(n, 2) % 4}),
        rank_tensor(r, {2 * r + 3, 2}, torch::kFloat32), {6, 4, 2});
  };
  torch::Tensor expected = torch::zeros({6, 4, 2});
  for (int r = 0; r < size(); ++r) expected += of_rank(r).to_dense();
  const torch::Tensor sum =
      sparse_allreduce(of_rank(rank()).to(device()), {.name = "sparse", .op = ReduceOp::kSum});
  EXPECT_TRUE(sum.is_sparse());
  EXPECT_TRUE(on_gpu(sum.to_dense(), expected));
}

TEST_F(GpuTraining, SparseGradients) {
  torch::manual_seed(3);
  const auto options = [](bool sparse) {
    return torch::nn::EmbeddingOptions(20, 3).sparse(sparse);
  };
  torch::nn::Embedding alone(options(false));
  torch::nn::Embedding table(options(true));
  {
    const torch::NoGradGuard no_grad;
    table->weight.copy_(alone->weight);
  }
  table->to(device());
  torch::optim::SGD sgd_alone(alone->parameters(), 0.1);
  torch::optim::SGD sgd(table->parameters(), 0.1);
  DistributedOptimizer optimizer(sgd, table->named_parameters());
  const auto rows = [](int r, int step) {
    return torch::tensor({(r + step) % 20, (3 * r + 1) % 20, 19});
  };
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    sgd_alone.zero_grad();
    table->forward(rows(rank(), step).to(device())).square().sum().backward();
    for (int r = 0; r < size(); ++r)
      (alone->forward(rows(r, step)).square().sum() / size()).backward();
    EXPECT_TRUE(table->weight.grad().is_sparse());
    optimizer.step();
    sgd_alone.step();
  }
  EXPECT_TRUE(on_gpu(table->weight.detach(), alone->weight.detach()));
}

// Like test/torch/cuda_capture_test.cpp, with a real capture.
TEST_F(GpuTraining, ACapturedOperationIsRefusedAndWorksAfterwards) {
  const c10::Stream side = side_stream();
  const c10::StreamGuard guard(side);
  const torch::Tensor ones = torch::ones({1000}, device());
  EXPECT_TRUE(on_gpu(allreduce(ones, {.name = "captured", .op = ReduceOp::kSum}),
                     torch::full({1000}, static_cast<float>(size()))));
  auto* const stream = static_cast<cudaStream_t>(side.native_handle());
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_THROW(allreduce_(ones, {.name = "captured", .op = ReduceOp::kSum}), UsageError);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  EXPECT_TRUE(on_gpu(allreduce(ones, {.name = "captured", .op = ReduceOp::kSum}),
                     torch::full({1000}, static_cast<float>(size()))));
}

}  // namespace
}  // namespace hvd::testing
