// Tests training whose forward and backward passes are a CUDA graph (docs/torch.md). Built if
// LibTorch has CUDA.
#include <ATen/cuda/CUDAGraph.h>
#include <hvd/torch.h>

#include <memory>
#include <vector>

#include "torch/support/cuda_test.h"

namespace hvd::testing {
namespace {

using GpuGraphs = CudaTest;

/// Trains for some steps on one stream, and returns the parameters. If `captured`, the steps from
/// the third one on replay a graph.
std::vector<torch::Tensor> trained(const c10::Stream& stream, bool captured) {
  const c10::StreamGuard guard(stream);
  torch::manual_seed(3);
  Net net(16);
  net->to(device());
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  const Batch first = Batch::of_rank(rank(), 0);
  const torch::Tensor x = first.x.to(device());
  const torch::Tensor y = first.y.to(device());
  std::unique_ptr<at::cuda::CUDAGraph> graph;
  for (int step = 0; step < 8; ++step) {
    const Batch batch = Batch::of_rank(rank(), step);
    x.copy_(batch.x);
    y.copy_(batch.y);
    if (captured && step == 2) {
      optimizer.zero_grad(
          /*set_to_none=*/true);  // so that the graph allocates its own gradients
      c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).synchronizeStream(stream);
      const NoSync no_sync = optimizer.no_sync();
      graph = std::make_unique<at::cuda::CUDAGraph>();
      graph->capture_begin();
      torch::mse_loss(net->forward(x), y).backward();
      graph->capture_end();
    }
    if (graph) {
      graph->replay();
    } else {
      optimizer.zero_grad();
      torch::mse_loss(net->forward(x), y).backward();
    }
    optimizer.step();
  }
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : net->parameters())
    values.push_back(parameter.detach().cpu());
  return values;
}

TEST_F(GpuGraphs, ForwardAndBackwardAreReplayed) {
  const c10::Stream stream = side_stream();
  const std::vector<torch::Tensor> plain = trained(stream, false);
  const std::vector<torch::Tensor> replayed = trained(stream, true);
  for (std::size_t i = 0; i < plain.size(); ++i)
    EXPECT_TRUE(near(replayed[i], plain[i], 1e-4)) << "parameter " << i;
  EXPECT_TRUE(same_on_all_ranks(replayed));
}

}  // namespace
}  // namespace hvd::testing
