#include <sstream>

#include "torch/checkpoint/checkpoint_job.h"
#include "torch/sharded/sharded_job.h"
#include "torch/sharded/whole_optimizer.h"

// Uses a ShardedOptimizer as a torch::optim::Optimizer, and tests the interface that it shares with
// DistributedOptimizer.

namespace hvd::testing {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

constexpr int kManySteps = 8;

/// The optimizers that are sharded by elements, and one that is sharded by whole parameters.
std::map<std::string, MakeOptimizer> all_optimizers() {
  std::map<std::string, MakeOptimizer> all = elementwise_optimizers();
  all["NormalizedSgd"] = [](auto p) { return std::make_unique<NormalizedSgd>(std::move(p), 0.05); };
  return all;
}

/// A training step of a program that does not use hvd.
void train_one_step(Optimizer& optimizer, Net& net, const Batch& batch) {
  optimizer.zero_grad();
  loss_of(net, batch).backward();
  optimizer.step();
}

TEST(ShardedInterface, IsAnOptimizerWithSchedulers) {
  for (const auto& [name, make] : all_optimizers()) {
    SCOPED_TRACE(name);
    Pair nets;
    const auto inner = make(nets.sharded->parameters());
    const auto serial = make(nets.serial->parameters());
    ShardedOptimizer optimizer(*inner, nets.sharded);
    torch::optim::StepLR own(optimizer, 2, 0.5), reference(*serial, 2, 0.5);
    for (int step = 0; step < kManySteps; ++step) {
      train_one_step(optimizer, nets.sharded, Batch::of_rank(rank(), step));
      train_one_step(*serial, nets.serial, Batch::joined(step));
      own.step();
      reference.step();
    }
    expect_equal_models(nets.sharded, nets.serial);
    EXPECT_EQ(optimizer.inner().param_groups()[0].options().get_lr(),
              serial->param_groups()[0].options().get_lr());
    inner->param_groups()[0].options().set_lr(0.125);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.125);
  }
}

TEST(ShardedInterface, RefusesToBypassTheWrapper) {
  Net net = same_net();
  torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
  ShardedOptimizer optimizer(inner, net);
  const std::string wrapped =
      message_of<UsageError>([&] { const ShardedOptimizer o(static_cast<Optimizer&>(optimizer)); });
  EXPECT_TRUE(contains(wrapped, "is not wrapped, got a ShardedOptimizer")) << wrapped;
  backward(net);
  inner.param_groups()[0].options().set_lr(0.2);
  static_cast<Optimizer&>(optimizer).param_groups()[0].options().set_lr(0.3);
  const std::string both = message_of<UsageError>([&] { optimizer.step(); });
  EXPECT_TRUE(both.starts_with("ShardedOptimizer: the option lr of parameter group 0")) << both;
  EXPECT_FALSE(contains(both, "DistributedOptimizer")) << both;
}

/// A plain optimizer and a wrapped one both load the saved state.
TEST(ShardedInterface, SavesAndLoadsTheWholeState) {
  for (const auto& [name, make] : all_optimizers()) {
    SCOPED_TRACE(name);
    const auto train = [](Optimizer& optimizer, Net& net, int from, int to) {
      for (int step = from; step < to; ++step)
        train_one_step(optimizer, net, Batch::of_rank(0, step));
    };
    Net expected = same_net(), first = same_net(), plain = same_net(), last = same_net();
    const auto uninterrupted = make(expected->parameters());
    train(*uninterrupted, expected, 0, 6);
    const auto inner = make(first->parameters());
    std::ostringstream saved;
    {
      ShardedOptimizer optimizer(*inner, first);
      train(optimizer, first, 0, 3);
      torch::save(static_cast<const Optimizer&>(optimizer), saved);
      train(optimizer, first, 3, 6);  // saving keeps the optimizer's state
    }
    EXPECT_TRUE(near(first->fc1->weight, expected->fc1->weight, 1e-5));
    const auto continue_with = [&](Optimizer& optimizer, Net& net) {
      std::istringstream stream(saved.str());
      torch::load(optimizer, stream);
      train(optimizer, net, 3, 6);
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(near(item.value(), expected->named_parameters()[item.key()], 1e-5))
            << item.key();
    };
    const auto go_to_step_3 = make(plain->parameters());
    train(*go_to_step_3, plain, 0, 3);
    copy_values(*plain, *last);
    const auto unwrapped = make(plain->parameters());
    continue_with(*unwrapped, plain);
    const auto again = make(last->parameters());
    ShardedOptimizer optimizer(*again, last);
    continue_with(optimizer, last);
  }
}

TEST(ShardedInterface, AddsGroups) {
  for (const auto& [name, make] : all_optimizers()) {
    if (name == "Adagrad") continue;  // LibTorch's makes state in its constructor only
    SCOPED_TRACE(name);
    Pair nets;
    const auto first_of = [](Net& net) { return net->fc1->parameters(); };
    const auto rest_of = [](Net& net) {
      std::vector<torch::Tensor> rest = net->fc2->parameters();
      for (const torch::Tensor& parameter : net->norm->parameters()) rest.push_back(parameter);
      return OptimizerParamGroup(rest);
    };
    const auto inner = make(first_of(nets.sharded));
    const auto serial = make(first_of(nets.serial));
    ShardedOptimizer optimizer(*inner, nets.sharded);
    for (int step = 0; step < kManySteps; ++step) {
      if (step == 4) {
        optimizer.zero_grad();
        optimizer.add_param_group(rest_of(nets.sharded));
        nets.serial->zero_grad();
        serial->add_param_group(rest_of(nets.serial));
        EXPECT_EQ(optimizer.param_groups().size(), 2U);
      }
      step_both(nets, optimizer, *serial, step);
      if (step < 4) nets.sharded->zero_grad();
    }
    expect_equal_models(nets.sharded, nets.serial);
  }
}

TEST(ShardedInterface, RefusesGroups) {
  Net net = same_net();
  torch::optim::SGD inner(net->fc1->parameters(), torch::optim::SGDOptions(0.1));
  ShardedOptimizer optimizer(inner, net);
  const std::string twice = message_of<UsageError>(
      [&] { optimizer.add_param_group(OptimizerParamGroup(net->fc1->parameters())); });
  EXPECT_TRUE(twice.starts_with("ShardedOptimizer::add_param_group: parameter 0")) << twice;
  const torch::Tensor elsewhere = torch::ones({2}, torch::kMeta).requires_grad_();
  NamedParameters names{{"elsewhere", elsewhere}};
  const std::string device = message_of<UsageError>([&] {
    optimizer.add_param_group(OptimizerParamGroup(std::vector<torch::Tensor>{elsewhere}), names);
  });
  EXPECT_TRUE(contains(device, "expected parameters on cpu")) << device;
  EXPECT_EQ(inner.param_groups().size(), 1U);
  backward(net);
  optimizer.step();
}

TEST(ShardedInterface, StepsWithoutSynchronizing) {
  train_by_each_optimizer([](Pair& nets, Optimizer& inner, Optimizer& serial) {
    ShardedOptimizer optimizer(inner, nets.sharded);
    for (int step = 0; step < kManySteps; ++step) {
      optimizer.zero_grad();
      loss_of(nets.sharded, Batch::of_rank(rank(), step)).backward();
      {
        const auto skip = optimizer.skip_synchronize();
        const std::string message = message_of<UsageError>([&] { optimizer.step(); });
        EXPECT_TRUE(message.starts_with("ShardedOptimizer::step() under skip_synchronize()"))
            << message;
        optimizer.synchronize();
        optimizer.step();
      }
      serial.zero_grad();
      loss_of(nets.serial, Batch::joined(step)).backward();
      serial.step();
    }
    expect_equal_models(nets.sharded, nets.serial);
  });
}

TEST(ShardedInterface, GradientsAreReducedByAHook) {
  train_by_each_optimizer([](Pair& nets, Optimizer& inner, Optimizer& serial) {
    int calls = 0;
    const auto hook = [&](const BucketGradients& bucket) -> std::function<torch::Tensor()> {
      ++calls;
      Handle handle =
          allreduce_async(bucket.values, {.name = bucket.name, .process_set = bucket.process_set});
      return [handle]() mutable { return handle.wait(); };
    };
    ShardedOptimizer optimizer(inner, nets.sharded, {.gradient_hook = hook});
    for (int step = 0; step < kManySteps; ++step) step_both(nets, optimizer, serial, step);
    EXPECT_GT(calls, 0);
    expect_equal_models(nets.sharded, nets.serial);
  });
}

/// The wrapped optimizer has no state to save, broadcast or load: the wrapper holds it.
TEST(ShardedInner, IsRefusedWhereItsStateIsWanted) {
  const SharedFolder folder;
  Net net = same_net();
  torch::optim::Adam inner(net->parameters(), torch::optim::AdamOptions(0.01));
  {
    ShardedOptimizer optimizer(inner, net);
    for (int step = 0; step < 3; ++step) train_one_step(optimizer, net, Batch::of_rank(0, step));
    const auto advises = [](const std::string& message) {
      EXPECT_TRUE(contains(message, "expected the ShardedOptimizer in its place")) << message;
    };
    advises(message_of<CheckpointError>(
        [&] { save_checkpoint(folder.path(), TrainingState().optimizer(inner)); }));
    advises(message_of<UsageError>([&] { broadcast_optimizer_state(inner); }));
    Optimizer& as_any = optimizer;
    save_checkpoint(folder.path(), TrainingState().optimizer(as_any));
    advises(message_of<CheckpointError>(
        [&] { load_checkpoint(folder.path(), TrainingState().optimizer(inner)); }));
    load_checkpoint(folder.path(), TrainingState().optimizer(as_any));
    EXPECT_GT(optimizer.state_bytes(), 0U);
  }
  load_checkpoint(folder.path(), TrainingState().optimizer(inner));
  EXPECT_EQ(inner.state().size(), net->parameters().size());
}

/// All ranks get the root's options, and each rank keeps its own part of the state.
TEST(ShardedInner, OptionsAreBroadcastThroughTheWrapper) {
  Pair nets;
  torch::optim::Adam inner(nets.sharded->parameters(), torch::optim::AdamOptions(0.01));
  torch::optim::Adam serial(nets.serial->parameters(), torch::optim::AdamOptions(0.01));
  ShardedOptimizer optimizer(inner, nets.sharded);
  for (int step = 0; step < kManySteps; ++step) {
    if (step == 4) {
      if (rank() == 0) optimizer.param_groups()[0].options().set_lr(0.002);
      broadcast_optimizer_state(optimizer);
      serial.param_groups()[0].options().set_lr(0.002);
    }
    step_both(nets, optimizer, serial, step);
  }
  expect_equal_models(nets.sharded, nets.serial);
}

/// With different learning rates the parts are updated differently, but every rank gathers the same
/// parameters, so comparing the parameters would not detect it.
TEST(ShardedOptions, ThatDifferAreNoticed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  Net net = same_net();
  torch::optim::Adam inner(net->parameters(), torch::optim::AdamOptions(0.01));
  ShardedOptimizer optimizer(inner, net, {.check_every = 2});
  for (int step = 0; step < 4; ++step) train_one_step(optimizer, net, Batch::of_rank(rank(), step));
  if (rank() == 1) inner.param_groups()[0].options().set_lr(0.005);
  std::string message;
  int steps = 0;
  while (message.empty() && steps < 3) {
    backward(net, ++steps);
    try {
      optimizer.step();
    } catch (const DivergedError& error) {
      message = error.what();
    }
  }
  EXPECT_TRUE(contains(message, "rank 0 has parameter group 0 with learning rate 0.01, "))
      << message;
  EXPECT_TRUE(contains(message, "rank 1 has parameter group 0 with learning rate 0.005, "))
      << message;
  EXPECT_LE(steps, 2);
}

}  // namespace
}  // namespace hvd::testing
