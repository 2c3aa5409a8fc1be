// Weighted training with batches of different sizes equals training in one process on all samples.
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <variant>

#include "torch/weights/weighted_job.h"

namespace hvd::testing {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

struct Mode {
  std::string name;
  DistributedOptimizerOptions options = {};
  torch::ScalarType type = torch::kFloat32;
  double tolerance = 1e-5;
  int passes = 1;  ///< per step
  bool sharded = false;
  bool zeroes = false;  ///< gradients are zeroed, not dropped
};

void PrintTo(const Mode& mode, std::ostream* stream) { *stream << mode.name; }

/// An average that the program computes itself.
GradientHook averaging_hook() {
  return [](const BucketGradients& bucket) {
    Handle mean =
        allreduce_async(bucket.values, {.name = bucket.name, .process_set = bucket.process_set});
    return [mean]() mutable { return mean.wait(); };
  };
}

template <class Optimizer>
void train(Net& net, Optimizer& optimizer, const Mode& mode, int steps) {
  int pass = 0;
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < mode.passes; ++i, ++pass) {
      optimizer.set_weight(samples_of(rank(), pass));
      mean_loss(net, own_batch(pass)).backward();
    }
    optimizer.step();
    optimizer.zero_grad(!mode.zeroes);
  }
}

void train_alone(Net& net, SGD& sgd, int passes, int steps) {
  for (int step = 0; step < steps; ++step) {
    std::vector<int> all(static_cast<std::size_t>(passes));
    std::iota(all.begin(), all.end(), step * passes);
    mean_loss(net, joined_batch(all)).backward();
    sgd.step();
    sgd.zero_grad();
  }
}

class WeightedTraining : public ::testing::TestWithParam<Mode> {};

TEST_P(WeightedTraining, EqualsOneProcessOnAllSamples) {
  const Mode& mode = GetParam();
  constexpr int kSteps = 6;
  Net net = same_net(mode.type), alone = same_net(mode.type);
  SGD inner(net->parameters(), SGDOptions(0.05).momentum(0.9));
  SGD reference(alone->parameters(), SGDOptions(0.05).momentum(0.9));
  if (mode.sharded) {
    ShardedOptimizer optimizer(
        inner, net,
        {.compression = mode.options.compression, .backward_passes_per_step = mode.passes});
    train(net, optimizer, mode, kSteps);
  } else {
    DistributedOptimizerOptions options = mode.options;
    options.backward_passes_per_step = mode.passes;
    DistributedOptimizer optimizer(inner, net, options);
    train(net, optimizer, mode, kSteps);
  }
  train_alone(alone, reference, mode.passes, kSteps);
  EXPECT_TRUE(near_parameters(net, alone, mode.tolerance));
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

INSTANTIATE_TEST_SUITE_P(
    Modes, WeightedTraining,
    ::testing::Values(
        Mode{.name = "plain"}, Mode{.name = "zeroed", .zeroes = true},
        Mode{.name = "without_buckets", .options = {.gradient_as_bucket_view = false}},
        Mode{.name = "accumulated", .passes = 3},
        Mode{.name = "accumulated_zeroed", .passes = 2, .zeroes = true},
        Mode{.name = "accumulated_without_buckets",
             .options = {.gradient_as_bucket_view = false},
             .passes = 2},
        Mode{.name = "predivided", .options = {.gradient_predivide_factor = 3}},
        Mode{.name = "groups", .options = {.groups = {{"fc1.weight", "fc2.bias"}}}},
        Mode{.name = "hook", .options = {.gradient_hook = averaging_hook()}},
        Mode{.name = "as_bf16",
             .options = {.compression = Compression::kBFloat16},
             .tolerance = 2e-2},
        Mode{.name = "as_fp16",
             .options = {.compression = Compression::kFloat16},
             .tolerance = 2e-3,
             .passes = 2},
        Mode{.name = "float64", .type = torch::kFloat64, .tolerance = 1e-12, .passes = 2},
        Mode{.name = "float64_as_bf16",
             .options = {.compression = Compression::kBFloat16},
             .type = torch::kFloat64,
             .tolerance = 2e-2},
        Mode{.name = "bfloat16", .type = torch::kBFloat16, .tolerance = 5e-2, .passes = 2},
        Mode{.name = "float16", .type = torch::kFloat16, .tolerance = 1e-2},
        Mode{.name = "sharded", .sharded = true},
        Mode{.name = "sharded_accumulated", .passes = 2, .sharded = true},
        Mode{.name = "sharded_as_bf16",
             .options = {.compression = Compression::kBFloat16},
             .tolerance = 2e-2,
             .sharded = true}),
    [](const auto& mode) { return mode.param.name; });

TEST(Weights, EqualOnesChangeNoBit) {
  std::vector<torch::Tensor> trained[2];
  for (const bool weighted : {false, true}) {
    Net net = same_net();
    SGD inner(net->parameters(), SGDOptions(0.05).momentum(0.9));
    DistributedOptimizer optimizer(inner, net);
    for (int step = 0; step < 5; ++step) {
      if (weighted) optimizer.set_weight(6);
      train_step(net, optimizer, step);
    }
    trained[weighted ? 1 : 0] = net->parameters();
  }
  for (std::size_t i = 0; i < trained[0].size(); ++i)
    EXPECT_TRUE(torch::equal(trained[0][i], trained[1][i])) << i;
}

TEST(Weights, MayBeginAndEndBetweenSteps) {
  Net net = same_net(), alone = same_net();
  SGD inner(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  for (int step = 0; step < 8; ++step) {
    const bool weighted = step >= 3 && step != 6;
    if (weighted) optimizer.set_weight(samples_of(rank(), step));
    optimizer.zero_grad();  // keeps the weight
    weighted ? mean_loss(net, own_batch(step)).backward() : backward(net, step);
    optimizer.step();
    reference.zero_grad();
    mean_loss(alone, weighted ? joined_batch({step}) : Batch::joined(step)).backward();
    reference.step();
  }
  EXPECT_TRUE(near_parameters(net, alone));
}

TEST(Weights, OfAnyMagnitudeAreSummedExactly) {
  // 2^40 samples on the last rank, and one on each other.
  const torch::Tensor w = torch::zeros({3}, torch::kFloat64).requires_grad_();
  SGD inner({w}, 1.0);
  DistributedOptimizer optimizer(inner);
  const bool last = rank() == size() - 1;
  const std::int64_t most = std::int64_t{1} << 40;
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    optimizer.set_weight(last ? most : 1);
    (w.sum() * (last ? 0.0 : 1.0)).backward();
    optimizer.synchronize();
    const double others = size() - 1;
    EXPECT_NEAR(w.grad()[0].item<double>(), others / (static_cast<double>(most) + others),
                1e-12 * others / static_cast<double>(most));
  }
}

TEST(Weights, NoSyncPassesHaveTheirOwn) {
  Net net = same_net(), alone = same_net();
  SGD inner(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  int pass = 0;
  for (int step = 0; step < 4; ++step) {
    std::vector<int> passes;
    const int count = 1 + step % 3;
    for (int i = 0; i < count; ++i, ++pass) {
      passes.push_back(pass);
      optimizer.set_weight(samples_of(rank(), pass));
      const torch::Tensor loss = mean_loss(net, own_batch(pass));
      if (i + 1 == count && step != 2) {
        loss.backward();
      } else {
        auto guard = optimizer.no_sync();
        loss.backward();
      }
    }
    optimizer.clip_grad_norm_(0.5);
    optimizer.step();
    optimizer.zero_grad();
    mean_loss(alone, joined_batch(passes)).backward();
    torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.5);
    reference.step();
    reference.zero_grad();
  }
  EXPECT_TRUE(near_parameters(net, alone));
}

TEST(Weights, GradientsThatTheModelHasResetDoNotCount) {
  Net net = same_net(), alone = same_net();
  SGD inner(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  for (int step = 0; step < 3; ++step) {
    {
      auto guard = optimizer.no_sync();
      optimizer.set_weight(100 + rank());
      mean_loss(net, own_batch(17)).backward();
    }
    optimizer.set_weight(samples_of(rank(), step));
    net->zero_grad();
    mean_loss(net, own_batch(step)).backward();
    optimizer.step();
    net->zero_grad();
    mean_loss(alone, joined_batch({step})).backward();
    reference.step();
    reference.zero_grad();
  }
  EXPECT_TRUE(near_parameters(net, alone));
}

TEST(Weights, APassAfterSynchronizeAddsAnotherMean) {
  Net net = same_net(), alone = same_net();
  SGD inner(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  for (int step = 0; step < 3; ++step) {
    for (const int pass : {2 * step, 2 * step + 1}) {
      optimizer.set_weight(samples_of(rank(), pass));
      mean_loss(net, own_batch(pass)).backward();
      optimizer.synchronize();
      mean_loss(alone, joined_batch({pass})).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
    reference.step();
    reference.zero_grad();
  }
  EXPECT_TRUE(near_parameters(net, alone));
}

/// The ranks without samples in a step.
bool is_empty(int rank, int step) { return (rank + step) % 2 == 1; }

TEST(Weights, ARankWithoutSamplesContributesNothing) {
  for (const bool backward : {true, false}) {
    Net net = same_net(), alone = same_net();
    SGD inner(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
    DistributedOptimizer optimizer(inner, net);
    for (int step = 0; step < 6; ++step) {
      std::vector<int> with;
      for (int r = 0; r < size(); ++r)
        if (!is_empty(r, step)) with.push_back(r);
      if (with.empty()) continue;
      optimizer.zero_grad();
      if (!is_empty(rank(), step)) {
        optimizer.set_weight(samples_of(rank(), step));
        mean_loss(net, own_batch(step)).backward();
      } else if (backward) {
        optimizer.set_weight(0);
        mean_loss(net, {torch::zeros({0, 4}), torch::zeros({0, 2})}).backward();  // nan
      } else if (step < 2) {
        optimizer.set_weight(0);  // later steps follow a weighted one
      }
      optimizer.step();
      reference.zero_grad();
      mean_loss(alone, joined_batch(with, {step})).backward();
      reference.step();
    }
    EXPECT_TRUE(near_parameters(net, alone)) << backward;
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  }
}

TEST(Weights, RanksThatHaveJoinedHaveNone) {
  Net net = same_net(), alone = same_net();
  SGD inner(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  int pass = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    // The first rank has no step in the first epoch, so that it misses the first weighted ones.
    const auto steps = [epoch](int of_rank) { return of_rank + 2 * epoch; };
    const int most = steps(size() - 1);
    for (int step = 0; step < steps(rank()); ++step) {
      optimizer.set_weight(samples_of(rank(), pass + step));
      mean_loss(net, own_batch(pass + step)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const int last = join();
    broadcast_parameters(net, last);
    for (int step = 0; step < most; ++step) {
      std::vector<int> present;
      for (int r = 0; r < size(); ++r)
        if (step < steps(r)) present.push_back(r);
      mean_loss(alone, joined_batch(present, {pass + step})).backward();
      reference.step();
      reference.zero_grad();
    }
    pass += most;
  }
  EXPECT_TRUE(near_parameters(net, alone));
}

TEST(Weights, CountWithinAProcessSet) {
  for_each_set([](const ProcessSet& set) {
    if (!set.included()) return;
    Net net, alone;
    broadcast_parameters(net, set.ranks().front(), set);
    copy_values(*net, *alone);
    SGD inner(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
    DistributedOptimizer optimizer(inner, net, {.process_set = set});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      optimizer.set_weight(samples_of(rank(), step));
      mean_loss(net, own_batch(step)).backward();
      optimizer.step();
      reference.zero_grad();
      mean_loss(alone, joined_batch(set.ranks(), {step})).backward();
      reference.step();
    }
    EXPECT_TRUE(near_parameters(net, alone));
  });
}

TEST(Weights, SparseGradientsHaveThem) {
  torch::manual_seed(5);
  const torch::Tensor start = torch::randn({10, 3});
  const auto table = [&] {
    return torch::nn::Embedding(
        torch::nn::EmbeddingOptions(10, 3).sparse(true)._weight(start.clone()));
  };
  torch::nn::Embedding net = table(), alone = table();
  SGD inner(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  const auto indices = [](int rank, int pass) {
    return (torch::arange(samples_of(rank, pass)) * 3 + rank + pass) % 10;
  };
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    {
      auto guard = optimizer.no_sync();
      optimizer.set_weight(samples_of(rank(), 2 * step));
      net->forward(indices(rank(), 2 * step)).square().sum(1).mean().backward();
    }
    optimizer.set_weight(samples_of(rank(), 2 * step + 1));
    net->forward(indices(rank(), 2 * step + 1)).square().sum(1).mean().backward();
    optimizer.step();
    std::vector<torch::Tensor> all;
    for (int r = 0; r < size(); ++r)
      for (const int pass : {2 * step, 2 * step + 1}) all.push_back(indices(r, pass));
    reference.zero_grad();
    alone->forward(torch::cat(all)).square().sum(1).mean().backward();
    reference.step();
  }
  EXPECT_TRUE(near(net->weight, alone->weight, 1e-5));
}

TEST(Weights, AClosureReturnsTheMeanLossOfAllSamples) {
  Net net = same_net(), alone = same_net();
  torch::optim::LBFGS inner(net->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  torch::optim::LBFGS reference(alone->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  DistributedOptimizer optimizer(inner, net);
  for (int step = 0; step < 2; ++step) {
    const torch::Tensor loss = optimizer.step([&] {
      optimizer.zero_grad();
      optimizer.set_weight(samples_of(rank(), step));
      const torch::Tensor own = mean_loss(net, own_batch(step));
      own.backward();
      return own;
    });
    const torch::Tensor expected = reference.step([&] {
      reference.zero_grad();
      const torch::Tensor all = mean_loss(alone, joined_batch({step}));
      all.backward();
      return all;
    });
    EXPECT_TRUE(near(loss, expected.detach(), 1e-4));
  }
  EXPECT_TRUE(near_parameters(net, alone, 1e-3));
}

TEST(Weights, AScalerSkipsTheStepOfAnInfAndClippingFollowsTheMean) {
  Net net = same_net(), alone = same_net();
  SGD inner(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  GradScaler scaler({.init_scale = 1024});
  for (int step = 0; step < 4; ++step) {
    const bool overflows = step == 2;
    optimizer.zero_grad();
    optimizer.set_weight(samples_of(rank(), step));
    const double factor =
        overflows && rank() == size() - 1 ? std::numeric_limits<double>::infinity() : 1;
    scaler.scale(mean_loss(net, own_batch(step)) * factor).backward();
    scaler.unscale_(optimizer);
    if (!overflows) torch::nn::utils::clip_grad_norm_(net->parameters(), 0.3);
    EXPECT_EQ(scaler.step(optimizer), !overflows);
    scaler.update();
    if (overflows) continue;
    reference.zero_grad();
    mean_loss(alone, joined_batch({step})).backward();
    torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.3);
    reference.step();
  }
  EXPECT_TRUE(near_parameters(net, alone));
}

TEST(Weights, AnAddedGroupHasThem) {
  Net net = same_net(), alone = same_net();
  SGD inner(net->fc1->parameters(), 0.1), reference(alone->fc1->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      optimizer.add_param_group(torch::optim::OptimizerParamGroup(net->fc2->parameters()));
      reference.add_param_group(torch::optim::OptimizerParamGroup(alone->fc2->parameters()));
    }
    optimizer.set_weight(samples_of(rank(), step));
    mean_loss(net, own_batch(step)).backward();
    optimizer.step();
    net->zero_grad();
    mean_loss(alone, joined_batch({step})).backward();
    reference.step();
    alone->zero_grad();
  }
  EXPECT_TRUE(near_parameters(net, alone));
}

}  // namespace
}  // namespace hvd::testing
