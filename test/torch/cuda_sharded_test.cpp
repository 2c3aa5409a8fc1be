#include <hvd/torch.h>

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "torch/support/cuda_test.h"

// A sharded optimizer with parameters on a (simulated) GPU, where buckets are packed and reduced as
// a whole and parameters are gathered in the GPU's memory.

namespace hvd::testing {
namespace {

using CudaSharded = CudaTest;

/// The parameters after some steps on a device, and this rank's state.
std::pair<std::vector<torch::Tensor>, std::size_t> sharded_on(torch::Device on, bool adam) {
  torch::manual_seed(3);
  Net net;
  net->to(on);
  broadcast_parameters(net);
  std::unique_ptr<torch::optim::Optimizer> inner;
  if (adam) {
    inner = std::make_unique<torch::optim::Adam>(net->parameters(), 0.01);
  } else {
    inner = std::make_unique<torch::optim::SGD>(net->parameters(),
                                                torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  ShardedOptimizer optimizer(*inner, net);
  GradScaler scaler({.init_scale = 16});
  for (int step = 0; step < 7; ++step) {
    optimizer.zero_grad();
    const Batch batch = Batch::of_rank(rank(), step);
    const torch::Tensor loss = torch::mse_loss(net->forward(batch.x.to(on)), batch.y.to(on));
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    optimizer.clip_grad_norm_(0.5);
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
  }
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : net->parameters()) {
    EXPECT_EQ(parameter.device().type(), on.type());
    values.push_back(parameter.detach().cpu());
  }
  return {values, optimizer.state_bytes()};
}

TEST_F(CudaSharded, TrainsAsOnTheCpu) {
  for (const bool adam : {true, false}) {
    SCOPED_TRACE(adam);
    const auto [cpu, cpu_bytes] = sharded_on(torch::kCPU, adam);
    const auto [gpu, gpu_bytes] = sharded_on(device(), adam);
    for (std::size_t i = 0; i < cpu.size(); ++i) EXPECT_TRUE(near(gpu[i], cpu[i], 1e-4));
    EXPECT_TRUE(same_on_all_ranks(gpu));
    const std::vector<std::size_t> all = allgather_object(gpu_bytes);
    const std::vector<std::size_t> expected = allgather_object(cpu_bytes);
    const std::size_t sum = std::accumulate(all.begin(), all.end(), std::size_t{0});
    EXPECT_EQ(sum, std::accumulate(expected.begin(), expected.end(), std::size_t{0}));
    EXPECT_EQ(gpu_bytes < sum, size() > 1) << "each rank has a part";
  }
}

}  // namespace
}  // namespace hvd::testing
