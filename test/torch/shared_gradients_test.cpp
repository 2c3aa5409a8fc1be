// Large gradients of a DistributedOptimizer are made in memory that the ranks share, by default.
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr std::int64_t kFeatures = 256;  // a weight of 256 KiB

std::string setting() {
  const char* const value = std::getenv("HVD_SHM_ALLOCATOR");
  return value == nullptr ? "" : value;
}

/// Two wide layers, whose weights are large and whose biases are small.
torch::nn::Sequential wide_net() {
  torch::manual_seed(5);
  torch::nn::Sequential net(torch::nn::Linear(kFeatures, kFeatures),
                            torch::nn::Linear(kFeatures, kFeatures));
  broadcast_parameters(net);
  return net;
}

torch::Tensor input_of(int rank, int step) {
  return torch::full({2, kFeatures}, 0.25 * (rank + 1) + 0.125 * step);
}

void backward(torch::nn::Sequential& net, int step, int of_rank = rank()) {
  net->forward(input_of(of_rank, step)).square().mean().backward();
}

class SharedGradients : public ::testing::Test {
 protected:
  void SetUp() override {
    if (size() == 1) GTEST_SKIP() << "one rank shares with none";
    if (!setting().empty()) GTEST_SKIP() << "HVD_SHM_ALLOCATOR is set";
  }
};

TEST_F(SharedGradients, LargeGradientsAreMadeInSharedMemoryAndNothingElseIs) {
  torch::nn::Sequential net = wide_net();
  const torch::Tensor weight = net->parameters()[0];
  backward(net, 0);
  EXPECT_FALSE(in_shared_memory(weight.grad())) << "no optimizer expects it";
  net->zero_grad();
  {
    SGD sgd(net->parameters(), SGDOptions(0.05));
    DistributedOptimizer optimizer(sgd, net->named_parameters());
    for (int step = 0; step < 4; ++step) {
      EXPECT_FALSE(in_shared_memory(torch::empty_like(weight))) << "a tensor of the program";
      optimizer.zero_grad();
      backward(net, step);
      EXPECT_TRUE(in_shared_memory(weight.grad())) << "step " << step;
      optimizer.step();
      EXPECT_FALSE(in_shared_memory(weight));
    }
  }
  net->zero_grad();
  backward(net, 0);
  EXPECT_FALSE(in_shared_memory(weight.grad())) << "the optimizer is gone";
}

TEST_F(SharedGradients, LargeGradientsAreReducedInPlaceAndSmallOnesInBuckets) {
  torch::nn::Sequential net = wide_net();
  SGD sgd(net->parameters(), SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    backward(net, step);
    std::vector<const void*> made;
    for (const torch::Tensor& parameter : net->parameters())
      made.push_back(parameter.grad().const_data_ptr());
    const std::uint64_t before = metrics().completed_operations;
    optimizer.synchronize();
    const std::uint64_t operations = metrics().completed_operations - before;
    for (const std::size_t i : {0U, 2U})  // the weights
      EXPECT_EQ(net->parameters()[i].grad().const_data_ptr(), made[i]) << "a copy of " << i;
    EXPECT_TRUE(step < 2 || operations <= 5)
        << operations << ", expected two weights, a bucket or two, and the flags";
    optimizer.step();
  }
}

TEST_F(SharedGradients, ResultsAreThoseOfACalculationByHand) {
  torch::nn::Sequential net = wide_net(), by_hand = wide_net();
  SGD sgd(net->parameters(), SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    backward(net, step);
    optimizer.synchronize();
    by_hand->zero_grad();
    for (int of_rank = 0; of_rank < size(); ++of_rank) backward(by_hand, step, of_rank);
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      const torch::Tensor parameter = by_hand->parameters()[i];
      EXPECT_TRUE(near(net->parameters()[i].grad(), parameter.grad() / size(), 1e-5)) << i;
      parameter.sub_(0.05 * parameter.grad() / size());
    }
    optimizer.step();
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

// Accumulation adds to gradients where they are, and zeroing keeps them.
TEST_F(SharedGradients, GradientsThatStayAreReducedWhereTheyAre) {
  torch::nn::Sequential net = wide_net();
  SGD sgd(net->parameters(), SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters(), {.backward_passes_per_step = 2});
  const void* place = nullptr;
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad(/*set_to_none=*/false);
    backward(net, step);
    backward(net, step + 1);
    const torch::Tensor gradient = net->parameters()[2].grad();
    EXPECT_TRUE(in_shared_memory(gradient));
    EXPECT_TRUE(step == 0 || gradient.const_data_ptr() == place);
    place = gradient.const_data_ptr();
    optimizer.step();
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

TEST_F(SharedGradients, AConvertedModuleHasSharedGradientsAgain) {
  torch::nn::Sequential net = wide_net();
  SGD sgd(net->parameters(), SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  for (const auto type : {torch::kFloat32, torch::kFloat64, torch::kFloat32}) {
    net->to(type);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      net->forward(input_of(rank(), step).to(type)).square().mean().backward();
      // The first backward pass with another type precedes the optimizer's look at the parameters.
      EXPECT_TRUE(step == 0 || in_shared_memory(net->parameters()[0].grad())) << type;
      optimizer.step();
    }
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

// Threads that run backward() at the same time, each for an optimizer of its own.
TEST_F(SharedGradients, ThreadsRunBackwardAtTheSameTime) {
  std::vector<torch::nn::Sequential> nets;
  std::vector<std::unique_ptr<SGD>> plain;
  std::vector<std::unique_ptr<DistributedOptimizer>> optimizers;
  for (int i = 0; i < 2; ++i) {
    nets.push_back(wide_net());
    plain.push_back(std::make_unique<SGD>(nets.back()->parameters(), SGDOptions(0.05)));
    optimizers.push_back(
        std::make_unique<DistributedOptimizer>(*plain.back(), nets.back()->named_parameters()));
  }
  for (int step = 0; step < 4; ++step) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < nets.size(); ++i) {
      optimizers[i]->zero_grad();
      threads.emplace_back([&, i] { backward(nets[i], step); });
    }
    for (std::thread& thread : threads) thread.join();
    for (std::size_t i = 0; i < nets.size(); ++i) {
      EXPECT_TRUE(in_shared_memory(nets[i]->parameters()[0].grad()));
      optimizers[i]->step();
    }
  }
  for (const auto& net : nets) EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

/// Passes every request on, and counts them.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    ++requests;
    return c10::GetDefaultCPUAllocator()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return c10::GetDefaultCPUAllocator()->raw_deleter();
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  std::atomic<int> requests{0};
};

TEST_F(SharedGradients, AProgramMayInstallAnAllocatorOfItsOwn) {
  static auto* const own = new CountingAllocator;  // tensors may outlive the test
  c10::Allocator* const before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(own);
  {
    torch::nn::Sequential net = wide_net();
    SGD sgd(net->parameters(), SGDOptions(0.05));
    DistributedOptimizer optimizer(sgd, net->named_parameters());
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      backward(net, step);
      EXPECT_FALSE(step == 0 && in_shared_memory(net->parameters()[0].grad()));
      optimizer.step();
    }
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  }
  EXPECT_GT(own->requests, 0);
  c10::SetCPUAllocator(before);
}

TEST(SharedGradientsOff, NoGradientIsMadeInSharedMemory) {
  if (setting() != "0") GTEST_SKIP() << "HVD_SHM_ALLOCATOR is not 0";
  torch::nn::Sequential net = wide_net();
  SGD sgd(net->parameters(), SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const torch::Tensor weight = net->parameters()[0];
    net->forward(input_of(rank(), step)).square().mean().backward();
    EXPECT_FALSE(step == 0 && in_shared_memory(weight.grad()));
    optimizer.step();
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

}  // namespace
}  // namespace hvd::testing
