// The ranks compare their parameters: a program that does not keep them equal gets an error.
#include <cstdlib>
#include <functional>
#include <limits>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

std::string last_rank() { return "rank " + std::to_string(size() - 1); }

/// Changes the parameter on the last rank only.
void change(const torch::Tensor& parameter, double relative) {
  const torch::NoGradGuard no_grad;
  if (rank() == size() - 1)
    parameter.detach().mul_(1 + relative * torch::linspace(-1, 1, parameter.numel())
                                               .view(parameter.sizes())
                                               .to(parameter.scalar_type()));
}

/// Trains until a DivergedError, and returns its message.
std::string error_within(int steps, const std::function<void(int)>& step) {
  for (int i = 0; i < steps; ++i) {
    try {
      step(i);
    } catch (const DivergedError& error) {
      return error.what();
    }
  }
  return {};
}

/// A model that is equal on all ranks, and its optimizer.
struct Training {
  explicit Training(const DistributedOptimizerOptions& options, double rate = 0.02)
      : inner(net->parameters(), SGDOptions(rate)),
        optimizer(inner, net->named_parameters(), options) {}

  /// Trains up to `steps` steps, until a DivergedError. @param before called before each step
  std::string error_within(int steps, const std::function<void(int)>& before = [](int) {}) {
    return testing::error_within(steps, [&](int i) {
      before(i);
      train_step(net, optimizer, i);
    });
  }

  Net net = same_net();
  SGD inner;
  DistributedOptimizer optimizer;
};

class ParameterCheckTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (size() == 1) GTEST_SKIP() << "one rank cannot differ";
  }
};

TEST_F(ParameterCheckTest, BeforeTheFirstUpdateEveryBitCounts) {
  const DistributedOptimizerOptions kinds[] = {
      {},
      {.op = ReduceOp::kSum},
      {.op = ReduceOp::kAdasum},
      {.compression = Compression::kFloat16},
      {.compression = Compression::kBFloat16, .gradient_predivide_factor = 3},
      {.gradient_as_bucket_view = false}};
  for (const torch::ScalarType type :
       {torch::kFloat32, torch::kFloat64, torch::kFloat16, torch::kBFloat16}) {
    for (const DistributedOptimizerOptions& options : kinds) {
      if (type != torch::kFloat32 && &options != &kinds[0])
        continue;  // the dtype and the options are independent
      Net net = same_net(type);
      SGD inner(net->parameters(), SGDOptions(0.01));
      const torch::Tensor before = net->fc2->bias.detach().clone();
      DistributedOptimizer optimizer(inner, net->named_parameters(), options);
      if (rank() == size() - 1) {
        const torch::NoGradGuard no_grad;
        net->norm->weight.detach()[3] = 1.0078125;  // the next number after 1 in bfloat16
      }
      backward(net, 0);
      const std::string message = message_of<DivergedError>([&] { optimizer.step(); });
      EXPECT_TRUE(contains(message, "'norm.weight' differs on")) << message;
      EXPECT_TRUE(contains(message, last_rank())) << message;
      EXPECT_TRUE(contains(message, "broadcast_parameters()")) << message;
      EXPECT_TRUE(torch::equal(before, net->fc2->bias));
      broadcast_parameters(net);
      optimizer.zero_grad();
      for (int step = 0; step < 3; ++step) train_step(net, optimizer, step);
      EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    }
  }
}

TEST_F(ParameterCheckTest, LaterRoundingsDoNotCountAndMoreDoes) {
  for (const torch::ScalarType type : {torch::kFloat32, torch::kFloat64}) {
    Net net = same_net(type);
    SGD inner(net->parameters(), SGDOptions(0.01).momentum(0.9));
    DistributedOptimizer optimizer(inner, net->named_parameters(), {.check_every = 3});
    const auto step = [&](int i) { train_step(net, optimizer, i); };
    EXPECT_EQ(error_within(7, step), "");
    change(net->fc1->weight, 2e-7);
    EXPECT_EQ(error_within(7, step), "");
    change(net->fc2->weight, 1e-2);
    const std::string message = error_within(4, step);
    EXPECT_TRUE(contains(message, "'fc2.weight' differs on")) << message;
    EXPECT_TRUE(contains(message, "broadcast_optimizer_state()")) << message;
    EXPECT_TRUE(contains(message, last_rank())) << message;
  }
}

// The first short run of a program ends before the hundredth reduction.
TEST_F(ParameterCheckTest, ComesSoonAfterTheFirstToo) {
  Training training({});
  const std::string message = training.error_within(12, [&](int i) {
    if (i == 2) change(training.net->fc2->weight, 1e-2);
  });
  EXPECT_TRUE(contains(message, "after 10 reductions")) << message;
  EXPECT_TRUE(contains(message, "'fc2.weight' differs on")) << message;
}

// A pretrained part was loaded on one rank only, and the optimizer does not have its parameters.
TEST_F(ParameterCheckTest, TheFirstSeesFrozenParametersToo) {
  Net net = same_net();
  for (torch::Tensor& parameter : net->fc1->parameters()) parameter.set_requires_grad(false);
  change(net->fc1->bias, 1e-2);
  std::vector<torch::Tensor> trained = net->fc2->parameters();
  SGD inner(trained, SGDOptions(0.01));
  DistributedOptimizer optimizer(inner, net->named_parameters());
  backward(net, 0);
  const std::string message = message_of<DivergedError>([&] { optimizer.step(); });
  EXPECT_TRUE(contains(message, "'fc1.bias' differs on")) << message;
  EXPECT_TRUE(contains(message, last_rank())) << message;
}

// Each rank has its own expert, which another optimizer trains.
TEST_F(ParameterCheckTest, LeavesOutParametersOfAnotherOptimizer) {
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  broadcast_parameters(model);
  auto named = model->named_parameters();
  {
    const torch::NoGradGuard no_grad;
    named["1.weight"].fill_(static_cast<float>(rank() + 1));
  }
  SGD shared({named["0.weight"], named["0.bias"]}, SGDOptions(0.05));
  SGD own({named["1.weight"], named["1.bias"]}, SGDOptions(0.05));
  {
    DistributedOptimizer optimizer(shared, model);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      own.zero_grad();
      model->forward(torch::ones({2, 4})).sum().backward();
      optimizer.step();
      own.step();
    }
    EXPECT_TRUE(same_on_all_ranks(named["0.weight"]));
  }
  if (size() == 1) return;
  named["1.weight"].set_requires_grad(false);
  DistributedOptimizer optimizer(shared, model);
  optimizer.zero_grad();
  model->forward(torch::ones({2, 4})).sum().backward();
  const std::string message = message_of<DivergedError>([&] { optimizer.step(); });
  EXPECT_TRUE(contains(message, "'1.weight'")) << message;
  EXPECT_TRUE(contains(message, "another optimizer")) << message;
}

TEST_F(ParameterCheckTest, NotANumberOnOneRankIsADifference) {
  Net net = same_net();
  SGD inner(net->parameters(), SGDOptions(0.01));
  DistributedOptimizer optimizer(inner, net->named_parameters(), {.check_every = 2});
  const auto step = [&](int i) {
    optimizer.zero_grad();
    if (i == 2)
      change(net->norm->bias.detach().fill_(0.5), std::numeric_limits<double>::quiet_NaN());
    torch::Tensor unused = net->fc2->bias.sum();
    unused.backward();
    optimizer.step();
  };
  EXPECT_TRUE(contains(error_within(6, step), "'norm.bias'"));
}

TEST_F(ParameterCheckTest, AStepThatOneRankSkips) {
  Net net = same_net();
  SGD inner(net->parameters(), SGDOptions(0.01));
  DistributedOptimizer optimizer(inner, net->named_parameters(), {.check_every = 4});
  const std::string message = error_within(12, [&](int i) {
    optimizer.zero_grad();
    backward(net, i);
    if (i == 1 && rank() == 0) return;
    optimizer.step();
  });
  EXPECT_TRUE(contains(message, "step()")) << message;
}

TEST_F(ParameterCheckTest, TheStepOfAWrappedAdam) {
  Net net = same_net();
  torch::optim::Adam inner(net->parameters(), torch::optim::AdamOptions(0.01));
  DistributedOptimizer optimizer(inner, net->named_parameters(), {.check_every = 4});
  // Reductions count, although the wrapper's step() is not called; the calls that drop the
  // gradients throw the error.
  for (const bool by_wrapper : {true, false}) {
    const std::string message = error_within(12, [&](int i) {
      by_wrapper ? optimizer.zero_grad() : inner.zero_grad();
      backward(net, i);
      inner.step();
    });
    EXPECT_TRUE(contains(message, "a step() of the wrapped optimizer instead of the")) << message;
  }
  optimizer.zero_grad();
}

TEST_F(ParameterCheckTest, OptimizerStateOfOneRankOnly) {
  // The learning rates differ, as if only rank 0 had loaded a checkpoint.
  Training training({.check_every = 2}, rank() == 0 ? 0.05 : 0.01);
  const std::string message = training.error_within(6);
  EXPECT_TRUE(contains(message, "broadcast_optimizer_state()")) << message;
}

TEST_F(ParameterCheckTest, ARankThatHasJoinedIsLeftOutUntilItReturns) {
  for (const bool broadcast : {true, false}) {
    Training training({.check_every = 3});
    EXPECT_EQ(training.error_within(4 + 5 * rank()), "");
    const int last = join();
    if (broadcast) broadcast_parameters(training.net, last);
    const std::string message = training.error_within(9);
    EXPECT_EQ(contains(message, "join()"), !broadcast) << message;
  }
}

// The joined rank's count of steps is behind, so the ranks' checks are not due in the same step.
TEST_F(ParameterCheckTest, ARankThatHasJoinedTakesPartInTheNextCheckOfAnyRank) {
  Training training({.check_every = 100});
  EXPECT_EQ(training.error_within(2 + 10 * rank()), "");
  broadcast_parameters(training.net, join());
  change(training.net->fc1->weight, 0.1);
  EXPECT_TRUE(contains(training.error_within(12), "'fc1.weight'"))
      << "rank 0 checks in its tenth step";
}

TEST_F(ParameterCheckTest, ARankThatJoinsBeforeItsFirstStep) {
  Training training({.check_every = 2});
  EXPECT_EQ(training.error_within(3 * rank()), "");
  broadcast_parameters(training.net, join());
  EXPECT_EQ(training.error_within(6), "");
  EXPECT_TRUE(same_on_all_ranks(training.net->parameters()));
}

TEST_F(ParameterCheckTest, CanBeTurnedOff) {
  Training training({.check_every = 0});
  change(training.net->fc1->weight, 0.1);
  EXPECT_EQ(training.error_within(3), "");
}

TEST_F(ParameterCheckTest, InAProcessSet) {
  for_each_set([](const ProcessSet& set) {
    torch::manual_seed(43);
    Net net;
    SGD inner(net->parameters(), SGDOptions(0.01));
    DistributedOptimizer optimizer(inner, net->named_parameters(), {.process_set = set});
    if (set.rank() == 0) change(net->fc1->bias.detach(), 0);
    if (set.size() > 1 && set.rank() == set.size() - 1) net->fc1->bias.detach().add_(1);
    backward(net, 0);
    if (set.size() == 1) return optimizer.step(), void();
    const std::string message = message_of<DivergedError>([&] { optimizer.step(); });
    EXPECT_TRUE(contains(message, "rank " + std::to_string(set.ranks().back()))) << message;
  });
}

// Compares the number of operations in steps that check the parameters with that in other steps.
TEST_F(ParameterCheckTest, CostsOneOperationInTheStepsThatHaveIt) {
  constexpr int kEvery = 50;
  Net net = same_net();
  SGD inner(net->parameters(), SGDOptions(0.01));
  DistributedOptimizer optimizer(inner, net->named_parameters(), {.check_every = kEvery});
  std::uint64_t steady = 0, all = 0, negotiated = 0;
  for (int i = 0; i < 5 * kEvery; ++i) {
    const Metrics before = metrics();
    train_step(net, optimizer, i);
    const Metrics after = metrics();
    const std::uint64_t operations = after.completed_operations - before.completed_operations;
    if (i < 2 * kEvery) {
      steady = operations;
      continue;
    }
    // The checks are in the steps 10 (the early one), 60, 110, ...
    EXPECT_EQ(operations, steady + (i % kEvery == 10 ? 1 : 0)) << "step " << i;
    all += operations;
    negotiated += after.negotiated_operations - before.negotiated_operations;
  }
  // A few steps after each of three checks are negotiated; more if the machine is busy.
  EXPECT_LT(negotiated, all / 2) << "the schedule is not repeated between checks";
  RecordProperty("operations_per_step", static_cast<int>(steady));
  RecordProperty("negotiated_for_three_checks", static_cast<int>(negotiated));
}

TEST(ParameterCheckSettings, AreChecked) {
  Net net;
  SGD inner(net->parameters(), SGDOptions(0.01));
  const auto construct = [&](DistributedOptimizerOptions options) {
    DistributedOptimizer optimizer(inner, net->named_parameters(), std::move(options));
  };
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { construct({.check_every = -1}); }), "check_every"));
  for (const char* const bad : {"often", "-1", "3x", "1.5"}) {
    ::setenv("HVD_CHECK_EVERY", bad, 1);
    const std::string message = message_of<UsageError>([&] { construct({}); });
    EXPECT_TRUE(contains(message, "HVD_CHECK_EVERY")) << message;
    EXPECT_TRUE(contains(message, bad)) << message;
    EXPECT_NO_THROW(construct({.check_every = 5}));
  }
  for (const char* const good : {"0", "7", ""}) {
    ::setenv("HVD_CHECK_EVERY", good, 1);
    EXPECT_NO_THROW(construct({}));
  }
  ::unsetenv("HVD_CHECK_EVERY");
}

// Models with different parameters.

TEST(DifferentModels, TheFirstParameterThatDiffersIsNamed) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const bool odd = rank() == size() - 1;
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  if (odd) model->push_back(torch::nn::Linear(4, 2));
  SGD inner(model->parameters(), SGDOptions(0.01));
  DistributedOptimizer optimizer(inner, model->named_parameters());
  for (int attempt = 0; attempt < 2; ++attempt) {
    optimizer.zero_grad();
    model->forward(torch::ones({2, 4})).sum().backward();
    const std::string message = message_of<MismatchError>([&] { optimizer.step(); });
    EXPECT_TRUE(contains(message, "'2.weight' [2,4]")) << message;
    EXPECT_TRUE(contains(message, "parameter 4")) << message;
    EXPECT_TRUE(contains(message, last_rank() + " has '2.weight'")) << message;
  }
}

TEST(DifferentOptions, AreNamedAtTheFirstStep) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const bool last = rank() == size() - 1;
  const std::pair<DistributedOptimizerOptions, std::string> cases[] = {
      {{.check_every = last ? 0 : 100}, "check_every differs: rank 0 has 100, " + last_rank()},
      {{.gradient_as_bucket_view = !last}, "gradient_as_bucket_view differs: rank 0 has 1, "},
      {{.bucket_bytes = last ? 0 : 4096}, "bucket_bytes differs: rank 0 has 4096, " + last_rank()}};
  for (const auto& [options, expected] : cases) {
    Net net = same_net();
    SGD inner(net->parameters(), SGDOptions(0.01));
    DistributedOptimizer optimizer(inner, net->named_parameters(), options);
    backward(net, 0);
    const std::string message = message_of<MismatchError>([&] { optimizer.step(); });
    EXPECT_TRUE(contains(message, expected)) << message;
    optimizer.zero_grad();
  }
}

TEST(DifferentModels, AParameterThatOneRankHasFrozen) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  Net net = same_net();
  if (rank() == 0) net->fc2->weight.set_requires_grad(false);
  SGD inner(net->parameters(), SGDOptions(0.01));
  DistributedOptimizer optimizer(inner, net->named_parameters());
  backward(net, 0);
  const std::string message = message_of<MismatchError>([&] { optimizer.step(); });
  EXPECT_TRUE(contains(message, "'fc2.weight'")) << message;
  net->fc2->weight.set_requires_grad(true);
  train_step(net, optimizer, 0);
}

}  // namespace
}  // namespace hvd::testing
