// Tests the warnings about mistakes after which each rank trains its own model, or no model learns,
// although no operation fails.
#include <c10/util/Exception.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using torch::optim::SGD;

/// Counts the warnings of `run` that contain `wanted`.
int warnings_of(const std::string& wanted, const std::function<void()>& run) {
  struct Count final : c10::WarningHandler {
    std::string wanted;
    int count = 0;
    void process(const c10::Warning& warning) override {
      count += contains(warning.msg(), wanted) ? 1 : 0;
    }
  } counting;
  counting.wanted = wanted;
  const c10::WarningUtils::WarningHandlerGuard guard(&counting);
  run();
  return counting.count;
}

void train(Net& net, DistributedOptimizer& optimizer, int steps) {
  for (int step = 0; step < steps; ++step) train_step(net, optimizer, step);
}

constexpr const char* kWithout = "step() without a gradient";

TEST(StepWithoutAGradient, OfAModelThatWasReplaced) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net);
  EXPECT_EQ(warnings_of(kWithout, [&] { train(net, optimizer, 3); }), 0);
  net = same_net();
  EXPECT_EQ(warnings_of(kWithout, [&] { train(net, optimizer, 3); }), 1) << "once";
}

TEST(StepWithoutAGradient, AfterAZeroGradInTheWrongPlace) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net);
  EXPECT_EQ(warnings_of(kWithout,
                        [&] {
                          for (int step = 0; step < 3; ++step) {
                            backward(net, step);
                            optimizer.zero_grad();
                            optimizer.step();
                          }
                        }),
            1);
}

TEST(StepWithoutAGradient, OnSomeRanksIsNoMistake) {
  if (size() == 1) GTEST_SKIP() << "there are no others";
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net);
  EXPECT_EQ(warnings_of(kWithout,
                        [&] {
                          for (int step = 0; step < 4; ++step) {
                            optimizer.zero_grad();
                            if (rank() == step % size()) backward(net, step);
                            optimizer.step();
                          }
                          for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
                          optimizer.zero_grad();
                          optimizer.step();
                        }),
            0);
}

TEST(DestroyedEarly, WhileGradientsAreReduced) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  auto optimizer = std::make_unique<DistributedOptimizer>(inner, net);
  train(net, *optimizer, 2);
  EXPECT_EQ(warnings_of("between backward() and step()",
                        [&] {
                          backward(net, 2);
                          optimizer.reset();
                        }),
            size() == 1 ? 0 : 1);
}

TEST(DestroyedEarly, AndTrainingGoesOnWithoutIt) {
  constexpr const char* kGoesOn = "since the DistributedOptimizer was destroyed";
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  const auto wrapped = [&] {
    DistributedOptimizer optimizer(inner, net);
    train(net, optimizer, 2);
  };
  const auto alone = [&](int steps) {
    for (int step = 0; step < steps; ++step) train_step(net, inner, step);
  };
  // A new wrapper for each epoch causes no warning.
  EXPECT_EQ(warnings_of(kGoesOn,
                        [&] {
                          for (int epoch = 0; epoch < 4; ++epoch) wrapped();
                        }),
            0);
  EXPECT_EQ(warnings_of(kGoesOn, [&] { alone(2); }), 0) << "an evaluation, perhaps";
  EXPECT_EQ(warnings_of(kGoesOn, [&] { alone(8); }), size() == 1 ? 0 : 1) << "once";
  broadcast_parameters(net);
  EXPECT_EQ(warnings_of(kGoesOn, wrapped), 0);
  // A wrapper of another kind takes the parameters over.
  EXPECT_EQ(warnings_of(kGoesOn,
                        [&] {
                          ShardedOptimizer optimizer(inner, net);
                          for (int step = 0; step < 5; ++step) train_step(net, optimizer, step);
                        }),
            0);
}

TEST(DestroyedEarly, AShardedOptimizerToo) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  const int expected = size() == 1 ? 0 : 1;
  EXPECT_EQ(warnings_of("", [&] { const ShardedOptimizer optimizer(inner, net); }), 0)
      << "an evaluation, perhaps";
  {
    ShardedOptimizer optimizer(inner, net);
    backward(net, 0);
    optimizer.step();
  }
  EXPECT_EQ(warnings_of("since the ShardedOptimizer was destroyed",
                        [&] {
                          for (int step = 0; step < 5; ++step) backward(net, step);
                        }),
            expected);
}

/// A model whose batch normalisation has statistics.
torch::nn::Sequential normalised() {
  torch::manual_seed(7);
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3),
                              torch::nn::Linear(3, 1));
  return model;
}

/// Counts the warnings about statistics in some steps with this rank's own batches, or with equal
/// ones.
template <class Optimizer>
int statistics_warnings(torch::nn::Sequential model, bool own_batches) {
  SGD inner(model->parameters(), 0.01);
  Optimizer optimizer(inner, model, {.check_every = 2});
  return warnings_of("different BatchNorm statistics, each of its own batches: '1.running_mean'",
                     [&] {
                       for (int step = 0; step < 8; ++step) {
                         optimizer.zero_grad();
                         torch::manual_seed(step + (own_batches ? 100 * rank() : 0));
                         model->forward(torch::randn({8, 4})).square().sum().backward();
                         optimizer.step();
                       }
                     });
}

TEST(BatchNormStatistics, RankZeroWarnsOfDifferentStatistics) {
  const int once = size() > 1 && rank() == 0 ? 1 : 0;
  EXPECT_EQ(statistics_warnings<DistributedOptimizer>(normalised(), true), once);
  EXPECT_EQ(statistics_warnings<ShardedOptimizer>(normalised(), true), once);
  EXPECT_EQ(statistics_warnings<DistributedOptimizer>(normalised(), false), 0);
  torch::nn::Sequential converted = normalised();
  convert_sync_batchnorm(converted);
  EXPECT_EQ(statistics_warnings<DistributedOptimizer>(converted, true), 0);
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(NotFinite, TheRankAndTheParameterAreNamedOnRequest) {
  const int culprit = size() - 1;
  for (const bool views : {true, false}) {
    for (const int bad : {0, 2}) {
      Net net = same_net();
      SGD inner(net->parameters(), 0.05);
      DistributedOptimizer optimizer(
          inner, net, {.gradient_as_bucket_view = views, .error_if_nonfinite = true});
      for (int step = 0; step < 4; ++step) {
        const torch::Tensor before = net->fc1->weight.detach().clone();
        optimizer.zero_grad();
        const torch::Tensor loss = loss_of(net, Batch::of_rank(rank(), step));
        if (step != bad) {
          loss.backward();
          optimizer.step();
          continue;
        }
        (rank() == culprit ? loss * kNan : loss).backward();
        const std::string message = message_of<NonFiniteError>([&] { optimizer.step(); });
        EXPECT_TRUE(contains(message, "rank " + std::to_string(culprit) + " nan")) << message;
        EXPECT_FALSE(size() > 1 && contains(message, "rank 0")) << message;
        EXPECT_TRUE(contains(message, "'fc2.")) << "backward reaches it first: " << message;
        EXPECT_TRUE(torch::equal(before, net->fc1->weight));
      }
      EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    }
  }
}

TEST(NotFinite, GradientsWithoutAHookAreCheckedToo) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net, {.error_if_nonfinite = true});
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    const auto guard = optimizer.no_sync();
    backward(net, step);
    {
      const torch::NoGradGuard no_grad;
      if (rank() == 0) net->norm->bias.mutable_grad().fill_(std::numeric_limits<float>::infinity());
    }
    const std::string message = message_of<NonFiniteError>([&] { optimizer.step(); });
    EXPECT_TRUE(contains(message, "rank 0 inf in the gradient of 'norm.bias'")) << message;
  }
}

TEST(NotFinite, ADroppedStepOfOneRankMeetsTheOthers) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.0);
  DistributedOptimizer optimizer(inner, net, {.error_if_nonfinite = true});
  train(net, optimizer, 2);  // until the buckets are learnt, which needs all ranks
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    backward(net, step);
    rank() == 0 ? optimizer.zero_grad() : optimizer.synchronize();
  }
}

// All ranks have the same nan, so that they do not diverge.
TEST(NotFinite, ParametersAreWorthAWarning) {
  if (size() == 1) GTEST_SKIP() << "parameters are not compared";
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net, {.check_every = 2});
  const auto train_with = [&](float factor) {
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      torch::Tensor loss = loss_of(net, Batch::of_rank(rank(), step));
      if (rank() == 0) loss = loss * factor;
      loss.backward();
      optimizer.step();
    }
  };
  EXPECT_EQ(warnings_of("error_if_nonfinite", [&] { train_with(1); }), 0);
  EXPECT_EQ(warnings_of("error_if_nonfinite", [&] { train_with(kNan); }), 1) << "once";
}

}  // namespace
}  // namespace hvd::testing
