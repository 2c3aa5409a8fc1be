#include <gmock/gmock.h>

#include "torch/support/script_net.h"
#include "torch/support/torch_test.h"

// Modules that Python has exported, where a torch::nn::Module is accepted.

namespace hvd::testing {
namespace {

using ::testing::HasSubstr;

TEST(ScriptModule, ParametersAndBuffersAreBroadcast) {
  const torch::jit::Module net = script_net(10 + rank());
  broadcast_buffers(net);
  EXPECT_TRUE(net.attr("running_mean").toTensor().equal(torch::full({2}, 10.0F)));
  const torch::jit::Module other = script_net(10 + rank());
  broadcast_parameters(other, size() - 1);
  const torch::jit::Module expected = script_net(10 + size() - 1);
  for (const char* const name : {"weight", "bias", "running_mean"})
    EXPECT_TRUE(other.attr(name).toTensor().equal(expected.attr(name).toTensor())) << name;
}

/// Trains three steps with this rank's data.
template <class Optimizer, class Forward>
void train_script(Optimizer& optimizer, const Forward& forward) {
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    forward(rank_tensor(rank(), {4, 3}, torch::kFloat, step)).square().mean().backward();
    optimizer.step();
  }
}

TEST(ScriptModule, TrainsAsAModuleOfCppDoes) {
  torch::jit::Module net = script_net(1);
  ScriptTwin twin;
  {
    const torch::NoGradGuard no_grad;
    twin->weight.copy_(net.attr("weight").toTensor());
    twin->bias.copy_(net.attr("bias").toTensor());
  }
  torch::optim::SGD own(parameters_of(net), 0.1), other(twin->parameters(), 0.1);
  DistributedOptimizer optimizer(own, net), other_optimizer(other, twin);
  train_script(optimizer, [&](const torch::Tensor& x) { return net.forward({x}).toTensor(); });
  train_script(other_optimizer, [&](const torch::Tensor& x) { return twin->forward(x); });
  // TorchScript's derivatives may round otherwise.
  EXPECT_TRUE(near(net.attr("weight").toTensor().detach(), twin->weight.detach()));
  EXPECT_TRUE(near(net.attr("bias").toTensor().detach(), twin->bias.detach()));
  EXPECT_TRUE(same_on_all_ranks(net.attr("weight").toTensor()));
  EXPECT_TRUE(same_on_all_ranks(twin->weight));
}

TEST(ScriptModule, TrainsWithAShardedOptimizer) {
  torch::jit::Module net = script_net(2);
  torch::optim::Adam adam(parameters_of(net), 0.1);
  ShardedOptimizer optimizer(adam, net);
  train_script(optimizer, [&](const torch::Tensor& x) { return net.forward({x}).toTensor(); });
  EXPECT_TRUE(same_on_all_ranks(net.attr("weight").toTensor()));
  EXPECT_FALSE(net.attr("weight").toTensor().equal(script_net(2).attr("weight").toTensor()));
}

// Groups are given by the parameters' names.
TEST(ScriptModule, GivesTheOptimizerItsNames) {
  const torch::jit::Module net = script_net(3);
  torch::optim::SGD sgd(parameters_of(net), 0.1);
  EXPECT_NO_THROW(DistributedOptimizer(sgd, net, {.groups = {{"weight", "bias"}}}));
  EXPECT_THAT(
      message_of<UsageError>([&] { DistributedOptimizer(sgd, net, {.groups = {{"weights"}}}); }),
      HasSubstr("'weights' is not the name of a parameter"));
}

// As in Python, whose parameters() gives a tied weight once.
TEST(ScriptModule, TiedWeightsAreTrainedOnce) {
  torch::jit::Module net = script_net(6);
  torch::jit::Module head("Head");
  head.register_parameter("weight", net.attr("weight").toTensor(), /*is_buffer=*/false);
  net.register_module("head", head);
  EXPECT_EQ(net.parameters().size(), 3U);
  EXPECT_EQ(parameters_of(net).size(), 2U);
  torch::optim::SGD sgd(parameters_of(net), 0.1);
  DistributedOptimizer optimizer(sgd, net);
  const torch::Tensor before = net.attr("weight").toTensor().detach().clone();
  (head.attr("weight").toTensor() + net.attr("weight").toTensor()).sum().backward();
  optimizer.step();
  EXPECT_TRUE(near(net.attr("weight").toTensor().detach(), before - 0.2));
}

TEST(ScriptModule, BatchNormCannotBeConverted) {
  torch::jit::Module net = script_net(4);
  EXPECT_EQ(convert_sync_batchnorm(net), 0U);
  const torch::jit::Module layer("__torch__.torch.nn.modules.batchnorm.BatchNorm2d",
                                 std::make_shared<torch::jit::CompilationUnit>());
  net.register_module("norm", layer);
  EXPECT_THAT(message_of<UsageError>([&] { convert_sync_batchnorm(net); }),
              HasSubstr("cannot replace 'norm' in the exported module"));
}

TEST(ScriptModule, AnEmptyOneIsRefused) {
  const torch::jit::Module empty{};
  const auto refused = HasSubstr("the torch::jit::Module is empty");
  torch::optim::SGD sgd(parameters_of(script_net(5)), 0.1);
  EXPECT_THAT(message_of<UsageError>([&] { broadcast_parameters(empty); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { broadcast_buffers(empty); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { DistributedOptimizer(sgd, empty); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { convert_sync_batchnorm(empty); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { TrainingState().model(empty); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { StateDict{empty}; }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { parameters_of(empty); }), refused);
  EXPECT_THAT(message_of<UsageError>([&] { broadcast_parameters(torch::jit::Module("Frozen")); }),
              HasSubstr("has no parameters and no buffers"));
}

}  // namespace
}  // namespace hvd::testing
