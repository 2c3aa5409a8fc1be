#include <numeric>

#include "sharded/parameter_shards.h"
#include "torch/sharded/sharded_job.h"

// Compares training with a sharded optimizer on N ranks with one process on the joined batch.

namespace hvd::testing {
namespace {

using torch::optim::Optimizer;

constexpr int kSteps = 8;

TEST(ShardedTraining, EqualsOneProcess) {
  train_by_each_optimizer([](Pair& nets, Optimizer& inner, Optimizer& serial) {
    ShardedOptimizer optimizer(inner, nets.sharded);
    for (int step = 0; step < kSteps; ++step) step_both(nets, optimizer, serial, step);
    expect_equal_models(nets.sharded, nets.serial);
  });
}

TEST(ShardedTraining, SumsAndFactors) {
  train_by_each_optimizer([](Pair& nets, Optimizer& inner, Optimizer& serial) {
    ShardedOptimizer optimizer(inner, nets.sharded, {.op = ReduceOp::kSum});
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      scale_loss(loss_of(nets.sharded, Batch::of_rank(rank(), step))).backward();
      optimizer.step();
      serial.zero_grad();
      loss_of(nets.serial, Batch::joined(step)).backward();
      serial.step();
    }
    expect_equal_models(nets.sharded, nets.serial);
  });
}

TEST(ShardedTraining, GradientsAreGoneAfterAStep) {
  Net net = same_net();
  torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.05));
  ShardedOptimizer optimizer(inner, net);
  for (int step = 0; step < 3; ++step) {
    backward(net, step);
    optimizer.step();
    for (const torch::Tensor& parameter : net->parameters())
      EXPECT_FALSE(parameter.grad().defined());
  }
}

/// Two groups with different options, and a scheduler on the wrapped optimizer.
TEST(ShardedTraining, GroupsAndSchedulersWork) {
  const auto make = [](Net& net) {
    using torch::optim::AdamOptions;
    using torch::optim::OptimizerParamGroup;
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(net->fc1->parameters(), std::make_unique<AdamOptions>(0.02));
    std::vector<torch::Tensor> rest = net->fc2->parameters();
    for (const torch::Tensor& parameter : net->norm->parameters()) rest.push_back(parameter);
    groups.emplace_back(rest, std::make_unique<AdamOptions>(AdamOptions(0.005).weight_decay(0.1)));
    return std::make_unique<torch::optim::Adam>(groups, AdamOptions(0.01));
  };
  Pair nets;
  const auto inner = make(nets.sharded);
  const auto serial = make(nets.serial);
  ShardedOptimizer optimizer(*inner, nets.sharded);
  torch::optim::StepLR own(*inner, 2, 0.5), reference(*serial, 2, 0.5);
  for (int step = 0; step < kSteps; ++step) {
    step_both(nets, optimizer, *serial, step);
    own.step();
    reference.step();
  }
  expect_equal_models(nets.sharded, nets.serial);
  EXPECT_EQ(inner->param_groups()[1].params().size(), 4U);
  EXPECT_TRUE(inner->param_groups()[0].params()[0].is_same(nets.sharded->fc1->weight));
}

/// A parameter without a gradient on any rank is not updated: no weight decay, no step counted.
TEST(ShardedTraining, UnusedParametersStayAsTheyAre) {
  train_by_each_optimizer([](Pair& nets, Optimizer& inner, Optimizer& serial) {
    ShardedOptimizer optimizer(inner, nets.sharded);
    for (int step = 0; step < kSteps; ++step) {
      // Every other step does not use the last layer, and in it only the last rank trains the
      // first layer.
      const auto loss = [&](Net& net, const Batch& batch, bool all) {
        const torch::Tensor hidden = torch::tanh(net->fc1->forward(batch.x));
        if (step % 2 == 0) return torch::mse_loss(net->fc2->forward(hidden), batch.y);
        return all ? hidden.pow(2).mean() : net->norm->forward(hidden.detach()).sum() * 0;
      };
      const bool last = rank() == size() - 1;
      optimizer.zero_grad();
      loss(nets.sharded, Batch::of_rank(rank(), step), last).backward();
      optimizer.step();
      serial.zero_grad();
      if (step % 2 == 0) {
        loss(nets.serial, Batch::joined(step), true).backward();
      } else {
        (loss(nets.serial, Batch::of_rank(size() - 1, step), true) / size()).backward();
        if (size() > 1) nets.serial->norm->weight.mutable_grad() = torch::zeros({8});
        if (size() > 1) nets.serial->norm->bias.mutable_grad() = torch::zeros({8});
      }
      serial.step();
    }
    expect_equal_models(nets.sharded, nets.serial);
  });
}

/// Frozen layers are in no bucket, so the parameters are distributed again twice, and state moves.
TEST(ShardedTraining, LayersAreFrozenAndUnfrozen) {
  train_by_each_optimizer([](Pair& nets, Optimizer& inner, Optimizer& serial) {
    ShardedOptimizer optimizer(inner, nets.sharded);
    for (int step = 0; step < 9; ++step) {
      const bool frozen = step >= 3 && step < 6;
      for (Net* net : {&nets.sharded, &nets.serial}) {
        for (auto& parameter : (*net)->fc1->parameters()) parameter.requires_grad_(!frozen);
      }
      step_both(nets, optimizer, serial, step);
    }
    expect_equal_models(nets.sharded, nets.serial);
  });
}

/// The optimizer has its whole state on every rank before it is wrapped. The wrapper shards it.
TEST(ShardedTraining, GoesOnWithStateOfTheOptimizer) {
  train_by_each_optimizer([](Pair& nets, Optimizer& inner, Optimizer& serial) {
    {
      DistributedOptimizer before(inner, nets.sharded);
      for (int step = 0; step < 3; ++step) step_both(nets, before, serial, step);
      before.zero_grad();
    }
    ShardedOptimizer optimizer(inner, nets.sharded);
    for (int step = 3; step < kSteps; ++step) step_both(nets, optimizer, serial, step);
    expect_equal_models(nets.sharded, nets.serial);
    EXPECT_TRUE(inner.state().empty());
  });
}

TEST(ShardedTraining, ClosureIsEvaluatedOnceAndItsLossReduced) {
  train_by_each_optimizer([](Pair& nets, Optimizer& inner, Optimizer& serial) {
    ShardedOptimizer optimizer(inner, nets.sharded);
    int calls = 0;
    for (int step = 0; step < 3; ++step) {
      const torch::Tensor loss = optimizer.step([&] {
        ++calls;
        optimizer.zero_grad();
        torch::Tensor own = loss_of(nets.sharded, Batch::of_rank(rank(), step));
        own.backward();
        return own;
      });
      const torch::Tensor expected = serial.step([&] {
        serial.zero_grad();
        torch::Tensor own = loss_of(nets.serial, Batch::joined(step));
        own.backward();
        return own;
      });
      EXPECT_TRUE(near(loss, expected.detach(), 1e-4));
    }
    EXPECT_EQ(calls, 3);
    expect_equal_models(nets.sharded, nets.serial);
  });
}

/// Moves the parameters to other memory, as Module::to() does.
TEST(ShardedTraining, FollowsParametersThatMove) {
  train_by_each_optimizer([](Pair& nets, Optimizer& inner, Optimizer& serial) {
    ShardedOptimizer optimizer(inner, nets.sharded);
    for (int step = 0; step < kSteps; ++step) {
      if (step == 3) {
        for (torch::Tensor& parameter : nets.sharded->parameters())
          parameter.set_data(parameter.detach().clone());
      }
      step_both(nets, optimizer, serial, step);
    }
    expect_equal_models(nets.sharded, nets.serial);
  });
}

/// A convolution on every rank, and a copy for the serial run.
struct Convolutions {
  torch::nn::Conv2d sharded{nullptr};
  torch::nn::Conv2d serial{nullptr};

  Convolutions() {
    torch::manual_seed(12);
    sharded = torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3));
    serial = torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3));
    broadcast_parameters(sharded);
    copy_values(*sharded, *serial);
  }
  static torch::Tensor loss_of(torch::nn::Conv2d& layer, int rank, int step) {
    torch::manual_seed(100 * step + rank);
    return layer->forward(torch::randn({2, 4, 5, 5})).pow(2).mean();
  }
  void backward(int step) { loss_of(sharded, rank(), step).backward(); }
  void backward_serial(int step) {
    torch::Tensor sum = torch::zeros({});
    for (int r = 0; r < size(); ++r) sum = sum + loss_of(serial, r, step) / size();
    sum.backward();
  }
  void lay_weight_out(torch::MemoryFormat format) const {
    sharded->weight.set_data(sharded->weight.detach().contiguous(format));
  }
};

/// Changes the order of the weight's elements after the first step, between later steps, and twice
/// in a row. The state must follow.
TEST(ShardedTraining, FollowsParametersThatGetOtherStrides) {
  for (const auto& [name, make] : elementwise_optimizers()) {
    SCOPED_TRACE(name);
    Convolutions layers;
    const auto inner = make(layers.sharded->parameters());
    const auto serial = make(layers.serial->parameters());
    ShardedOptimizer optimizer(*inner, layers.sharded);
    for (int step = 0; step < 10; ++step) {
      if (step == 1 || step == 5) layers.lay_weight_out(torch::MemoryFormat::ChannelsLast);
      if (step == 4 || step == 6) layers.lay_weight_out(torch::MemoryFormat::Contiguous);
      optimizer.zero_grad();
      layers.backward(step);
      optimizer.step();
      serial->zero_grad();
      layers.backward_serial(step);
      serial->step();
      EXPECT_TRUE(near(layers.sharded->weight, layers.serial->weight, 1e-4)) << step;
    }
    EXPECT_TRUE(same_on_all_ranks(layers.sharded->parameters()));
  }
}

/// The ranks have parts of a gradient in the old order.
TEST(ShardedTraining, RefusesOtherStridesBetweenBackwardAndStep) {
  if (size() == 1) GTEST_SKIP() << "a rank alone has all of every gradient";
  Convolutions layers;
  torch::optim::SGD inner(layers.sharded->parameters(), torch::optim::SGDOptions(0.1));
  ShardedOptimizer optimizer(inner, layers.sharded);
  for (int step = 0; step < 3; ++step) {
    layers.backward(step);
    optimizer.step();
  }
  layers.backward(3);
  layers.lay_weight_out(torch::MemoryFormat::ChannelsLast);
  const auto before = layers.sharded->weight.detach().clone();
  const std::string message = message_of<UsageError>([&] { optimizer.step(); });
  EXPECT_TRUE(contains(message, "strides (memory format) of parameter 'weight'")) << message;
  EXPECT_TRUE(torch::equal(before, layers.sharded->weight));
  optimizer.zero_grad();
  layers.backward(3);
  optimizer.step();
  EXPECT_TRUE(same_on_all_ranks(layers.sharded->parameters()));
}

// A step must not plan the shards again: this would be slow with many small parameters.
TEST(ParameterShards, ArePlannedOnlyWhenAParameterOrAUnitHasChanged) {
  Net net = same_net();
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
  const std::vector<torch::Tensor> parameters = net->parameters();
  libtorch::ParameterShards shards(adam, parameters, "parts.shards", {});
  int plans = 0;
  const auto plans_after = [&](std::uint64_t version) {
    shards.lay_out(version, [&] {
      ++plans;
      std::vector<libtorch::ParameterShards::Shard> units;
      for (std::size_t p = 0; p < parameters.size(); ++p)
        units.push_back({.plan = {.members = {p}, .first = {0}, .elements = parameters[p].numel()},
                         .frozen = !parameters[p].requires_grad()});
      return units;
    });
    return plans;
  };
  EXPECT_EQ(plans_after(1), 1);
  EXPECT_EQ(plans_after(1), 1);
  EXPECT_EQ(plans_after(2), 2);
  net->fc1->weight.set_requires_grad(false);
  EXPECT_EQ(plans_after(2), 3);
  EXPECT_EQ(plans_after(2), 3);
  net->fc2->weight.set_data(net->fc2->weight.detach().t().contiguous().t());
  EXPECT_EQ(plans_after(2), 4);
  EXPECT_EQ(plans_after(2), 4);
}

TEST(ShardedState, IsDividedByTheNumberOfRanks) {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(67, 301), torch::nn::Tanh(),
                            torch::nn::Linear(301, 131), torch::nn::Linear(131, 5));
  broadcast_parameters(*net);
  std::size_t elements = 0;
  for (const torch::Tensor& parameter : net->parameters())
    elements += static_cast<std::size_t>(parameter.numel());
  torch::optim::Adam inner(net->parameters(), torch::optim::AdamOptions(0.01));
  ShardedOptimizer optimizer(inner, *net);
  for (int step = 0; step < 3; ++step) {
    net->forward(torch::full({3, 67}, rank() + 1.0)).pow(2).mean().backward();
    optimizer.step();
    const double whole = static_cast<double>(elements * 2 * sizeof(float));
    EXPECT_LE(static_cast<double>(optimizer.state_bytes()), whole * (1.0 / size() + 0.02));
    const auto all = allgather_object(optimizer.state_bytes());
    EXPECT_EQ(std::accumulate(all.begin(), all.end(), std::size_t{0}),
              elements * 2 * sizeof(float));
    EXPECT_TRUE(inner.state().empty());
  }
}

}  // namespace
}  // namespace hvd::testing
