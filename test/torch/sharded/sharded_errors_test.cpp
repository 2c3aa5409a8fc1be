#include <numeric>

#include "torch/checkpoint/checkpoint_job.h"
#include "torch/sharded/sharded_job.h"
#include "torch/sharded/whole_optimizer.h"

// Optimizers that are sharded by whole parameters, optimizers that cannot be sharded, and ranks
// that differ.

namespace hvd::testing {
namespace {

MakeOptimizer normalized_sgd() {
  return [](auto p) { return std::make_unique<NormalizedSgd>(std::move(p), 0.05); };
}

TEST(ShardedWhole, EqualsOneProcess) {
  Pair nets;
  const auto inner = normalized_sgd()(nets.sharded->parameters());
  const auto serial = normalized_sgd()(nets.serial->parameters());
  ShardedOptimizer optimizer(*inner, nets.sharded);
  for (int step = 0; step < 8; ++step) {
    for (Net* net : {&nets.sharded, &nets.serial})
      (*net)->fc1->weight.requires_grad_(step < 3 || step > 5);
    optimizer.zero_grad();
    loss_of(nets.sharded, Batch::of_rank(rank(), step)).backward();
    const double norm = optimizer.clip_grad_norm_(0.5);
    optimizer.step();
    serial->zero_grad();
    loss_of(nets.serial, Batch::joined(step)).backward();
    EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(nets.serial->parameters(), 0.5), 1e-4);
    serial->step();
  }
  expect_equal_models(nets.sharded, nets.serial);
}

/// Each rank has the state of its own parameters only, and every rank has some.
TEST(ShardedWhole, StateIsSharedOut) {
  std::vector<torch::Tensor> parameters;
  for (int i = 0; i < 8; ++i) parameters.push_back(torch::full({64, 64}, 1.0F).requires_grad_());
  NormalizedSgd inner(parameters, 0.1);
  ShardedOptimizer optimizer(inner);
  for (int step = 0; step < 2; ++step) {
    torch::Tensor sum = torch::zeros({});
    for (const torch::Tensor& parameter : parameters) sum = sum + parameter.pow(2).sum();
    sum.backward();
    optimizer.step();
  }
  const std::size_t whole = 8 * 64 * 64 * sizeof(float);
  const auto all = allgather_object(optimizer.state_bytes());
  const std::size_t total = std::accumulate(all.begin(), all.end(), std::size_t{0});
  EXPECT_GE(total, whole);
  EXPECT_LT(optimizer.state_bytes(), total / static_cast<std::size_t>(size()) * 102 / 100);
}

TEST(ShardedWhole, CheckpointsGoBothWays) {
  const auto make = normalized_sgd();
  const auto train = [](auto& wrapper, Net& net, int from, int to) {
    for (int step = from; step < to; ++step) {
      wrapper.zero_grad();
      loss_of(net, Batch::of_rank(0, step)).backward();
      wrapper.step();
    }
  };
  Net expected = same_net();
  const auto reference = make(expected->parameters());
  train(*reference, expected, 0, 9);

  const SharedFolder folder;
  Net first = same_net();
  const auto inner = make(first->parameters());
  {
    ShardedOptimizer optimizer(*inner, first);
    train(optimizer, first, 0, 3);
    save_checkpoint(folder.path(), TrainingState().model(first).optimizer(optimizer));
  }
  Net second = same_net();
  const auto other = make(second->parameters());
  {
    DistributedOptimizer optimizer(*other, second);
    load_checkpoint(folder.path(), TrainingState().model(second).optimizer(optimizer));
    train(optimizer, second, 3, 6);
    save_checkpoint(folder.path(), TrainingState().model(second).optimizer(optimizer));
  }
  Net third = same_net();
  const auto last = make(third->parameters());
  ShardedOptimizer optimizer(*last, third);
  load_checkpoint(folder.path(), TrainingState().model(third).optimizer(optimizer));
  train(optimizer, third, 6, 9);
  const auto values = expected->parameters();
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_TRUE(near(third->parameters()[i], values[i], 1e-5));
}

TEST(ShardedErrors, LbfgsIsRefused) {
  Net net = same_net();
  torch::optim::LBFGS inner(net->parameters(), torch::optim::LBFGSOptions(0.1));
  const std::string message =
      message_of<UsageError>([&] { const ShardedOptimizer optimizer(inner, net); });
  EXPECT_TRUE(contains(message, "LBFGS")) << message;
  // The failed constructor has not registered anything.
  const DistributedOptimizer optimizer(inner, net);
}

/// Only one rank has two devices, but all ranks throw. The other ranks' errors name that rank.
TEST(ShardedErrors, ParametersOnTwoDevicesAreRefused) {
  const int last = size() - 1;
  std::vector<torch::Tensor> parameters{torch::ones({3}).requires_grad_()};
  parameters.push_back(
      torch::ones({3}, rank() == last ? torch::kMeta : torch::kCPU).requires_grad_());
  torch::optim::SGD inner(parameters, torch::optim::SGDOptions(0.1));
  const std::string message =
      rank() == last ? message_of<UsageError>([&] { const ShardedOptimizer o(inner); })
                     : message_of<MismatchError>([&] { const ShardedOptimizer o(inner); });
  EXPECT_TRUE(contains(message, "on one device, got some on cpu and some on meta")) << message;
  EXPECT_EQ(contains(message, "rank " + std::to_string(last)), rank() != last) << message;
}

TEST(ShardedErrors, ADeviceThatDiffersByRankIsNamed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const torch::Tensor parameter = torch::ones({3}, rank() == 1 ? torch::kMeta : torch::kCPU);
  torch::optim::SGD inner({parameter.clone().requires_grad_()}, torch::optim::SGDOptions(0.1));
  const std::string message =
      message_of<MismatchError>([&] { const ShardedOptimizer optimizer(inner); });
  EXPECT_TRUE(contains(message, "rank 0 has 'param0' [3] Float on cpu")) << message;
  EXPECT_TRUE(contains(message, "rank 1 has 'param0' [3] Float on meta")) << message;
}

TEST(ShardedErrors, RanksThatDifferAreNamed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const bool other = rank() == 1;
  const auto expect = [&](torch::optim::Optimizer& inner, const torch::nn::Module& module,
                          const std::vector<std::string>& parts) {
    const std::string message =
        message_of<MismatchError>([&] { const ShardedOptimizer optimizer(inner, module); });
    for (const std::string& part : parts) EXPECT_TRUE(contains(message, part)) << message;
  };
  {
    torch::nn::Sequential net(torch::nn::Linear(4, other ? 5 : 3), torch::nn::Linear(3, 2));
    torch::optim::Adam inner(net->parameters(), torch::optim::AdamOptions(0.1));
    const auto before = net[0]->parameters()[0].detach().clone();
    expect(inner, *net, {"rank 0 has '0.weight' [3,4]", "rank 1 has '0.weight' [5,4]"});
    EXPECT_TRUE(torch::equal(before, net[0]->parameters()[0]));
  }
  Net net = same_net();
  {
    torch::optim::Adam inner(net->parameters(), torch::optim::AdamOptions(other ? 0.2 : 0.1));
    expect(inner, *net, {"learning rate 0.1", "learning rate 0.2"});
  }
  {
    torch::optim::Adam inner(net->parameters(),
                             torch::optim::AdamOptions(0.1).weight_decay(other ? 0.2 : 0.1));
    expect(
        inner, *net,
        {"parameter group 0 with learning rate 0.1, ", "weight_decay 0.1, ", "weight_decay 0.2, "});
  }
  const auto inner = elementwise_optimizers().at(other ? "Adam" : "SGD")(net->parameters());
  expect(*inner, *net, {"rank 0 has torch::optim::SGD", "rank 1 has torch::optim::Adam"});
}

TEST(ShardedErrors, WrongUseIsRefused) {
  Net net = same_net();
  torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
  const auto refused = [&](const ShardedOptimizerOptions& options) {
    return message_of<UsageError>([&] { const ShardedOptimizer o(inner, net, options); });
  };
  EXPECT_TRUE(contains(refused({.op = ReduceOp::kAdasum}), "ShardedOptimizer: op"));
  EXPECT_TRUE(contains(refused({.op = ReduceOp::kMax}), "ShardedOptimizer: op"));
  EXPECT_TRUE(contains(refused({.backward_passes_per_step = 0}), "backward_passes_per_step"));
  {
    const DistributedOptimizer wrapped(inner, net);
    EXPECT_TRUE(contains(refused({}), "wrapped"));
  }
  torch::optim::SGD twice({net->fc1->weight, net->fc1->weight}, torch::optim::SGDOptions(0.1));
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { const ShardedOptimizer optimizer(twice); }), "twice"));

  ShardedOptimizer optimizer(inner, net);
  backward(net);
  optimizer.step();
  inner.add_param_group(
      torch::optim::OptimizerParamGroup(std::vector<torch::Tensor>{torch::ones({2})}));
  EXPECT_TRUE(contains(message_of<UsageError>([&] { optimizer.step(); }), "add_param_group"));
}

/// Messages of the common base name the ShardedOptimizer.
TEST(ShardedErrors, SpeakOfAShardedOptimizer) {
  const auto speaks = [](const std::string& message) {
    EXPECT_TRUE(message.starts_with("ShardedOptimizer")) << message;
    EXPECT_FALSE(contains(message, "DistributedOptimizer")) << message;
  };
  for (const bool whole : {false, true}) {
    Net net = same_net();
    const auto inner = whole ? normalized_sgd()(net->parameters())
                             : elementwise_optimizers().at("SGD")(net->parameters());
    ShardedOptimizer optimizer(*inner, net);
    for (int step = 0; step < 3; ++step) {  // one by one, and in buckets
      optimizer.zero_grad();
      backward(net, step);
      speaks(message_of<UsageError>([&] { backward(net, step); }));
      speaks(message_of<UsageError>([&] { net->fc1->weight.grad().data(); }));
      optimizer.step();
    }
    backward(net, 3);
    net->fc1->weight.mutable_grad().add_(1);
    speaks(message_of<UsageError>([&] { optimizer.step(); }));
    optimizer.zero_grad();
    speaks(message_of<UsageError>([&] {
      loss_of(net, Batch::of_rank(rank(), 4))
          .backward({}, /*retain_graph=*/std::nullopt, /*create_graph=*/true);
    }));
    optimizer.zero_grad();
    EXPECT_TRUE(contains(message_of<UsageError>([&] { const ShardedOptimizer o(*inner, net); }),
                         "ShardedOptimizer: this optimizer is wrapped"));
    torch::optim::SGD other(net->parameters(), torch::optim::SGDOptions(0.1));
    EXPECT_TRUE(contains(message_of<UsageError>([&] { const ShardedOptimizer o(other, net); }),
                         "ShardedOptimizer: parameter 'fc1.weight' belongs to another"));
  }
  if (size() == 1) return;
  Net net = same_net();
  const torch::NoGradGuard no_grad;
  net->fc1->weight.add_(rank() == 1 ? 1 : 0);
  torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
  ShardedOptimizer optimizer(inner, net);
  {
    const torch::AutoGradMode with_grad(true);
    backward(net);
  }
  speaks(message_of<DivergedError>([&] { optimizer.step(); }));
}

/// No rank would update the part of a rank that has joined.
TEST(ShardedErrors, JoinIsNoticed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  Net net = same_net();
  torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
  ShardedOptimizer optimizer(inner, net);
  for (int step = 0; step < 3; ++step) {
    backward(net, step);
    optimizer.step();
  }
  if (rank() != 0) {
    backward(net, 3);
    const std::string message = message_of<UsageError>([&] { optimizer.step(); });
    EXPECT_TRUE(contains(message, "join()")) << message;
  }
  join();
}

/// Throws in its second step on the first rank.
class Failing final : public torch::optim::Optimizer {
 public:
  explicit Failing(std::vector<torch::Tensor> parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<torch::optim::SGDOptions>(0.1)) {}
  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    if (++steps_ == 2 && rank() == 0) throw std::runtime_error("no memory");
    return {};
  }

 private:
  int steps_ = 0;
};

/// A rank whose optimizer fails still submits its part, for which the others would wait.
TEST(ShardedErrors, AnOptimizerThatThrowsLeavesNoRankWaiting) {
  Net net = same_net();
  Failing inner(net->parameters());
  ShardedOptimizer optimizer(inner, net);
  for (int step = 0; step < 4; ++step) {
    backward(net, step);
    if (step == 1 && rank() == 0) {
      EXPECT_THROW(optimizer.step(), std::runtime_error);
      EXPECT_EQ(inner.param_groups()[0].params().size(), net->parameters().size());
      optimizer.zero_grad();
    } else {
      optimizer.step();
    }
  }
}

}  // namespace
}  // namespace hvd::testing
