#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using torch::optim::SGD;

std::string optimizer_error(torch::optim::Optimizer& optimizer, const NamedParameters& names,
                            const DistributedOptimizerOptions& options = {}) {
  return message_of<UsageError>([&] { DistributedOptimizer wrapped(optimizer, names, options); });
}

TEST(Construction, WrongNamesAndOptionsAreUsageErrors) {
  Net net;
  SGD optimizer(net->parameters(), 0.1);
  const auto names = net->named_parameters();
  const std::string missing = optimizer_error(optimizer, net->fc1->named_parameters());
  EXPECT_TRUE(contains(missing, "has no name")) << missing;
  EXPECT_TRUE(contains(missing, "[2,8]")) << missing;

  EXPECT_TRUE(
      contains(optimizer_error(optimizer, names, {.groups = {{"nonsense"}}}), "'nonsense'"));
  const std::string twice =
      optimizer_error(optimizer, names, {.groups = {{"fc1.bias"}, {"fc1.bias"}}});
  EXPECT_TRUE(contains(twice, "'fc1.bias' occurs twice")) << twice;
  EXPECT_TRUE(contains(optimizer_error(optimizer, names, {.op = ReduceOp::kMax}), "max"));
  EXPECT_TRUE(
      contains(optimizer_error(optimizer, names, {.backward_passes_per_step = 0}), "got 0"));
  EXPECT_TRUE(contains(
      optimizer_error(optimizer, names, {.op = ReduceOp::kSum, .gradient_predivide_factor = 2}),
      "kAverage"));
  EXPECT_TRUE(
      contains(optimizer_error(optimizer, names, {.gradient_predivide_factor = 0}), "positive"));

  EXPECT_TRUE(contains(optimizer_error(optimizer, names, {.bucket_bytes = -1}), "got -1"));

  // Names for more parameters than the optimizer has are valid; a second wrapper is not.
  SGD part(net->fc1->parameters(), 0.1);
  DistributedOptimizer first(part, names);
  EXPECT_TRUE(contains(optimizer_error(part, names), "wrapped"));
  EXPECT_EQ(&first.inner(), &part);
  EXPECT_THROW(first.set_backward_passes_per_step(0), UsageError);
}

TEST(Passes, OneTooManyIsAnErrorFromBackwardThatDoesNoHarm) {
  Net net;
  broadcast_parameters(net);
  SGD inner(net->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  backward(net, 0);
  const std::string message = message_of<UsageError>([&] { backward(net, 1); });
  // The last layer's gradient is the first to be produced a second time.
  EXPECT_TRUE(contains(message, "'fc2.")) << message;
  EXPECT_TRUE(contains(message, "zero_grad()")) << message;
  optimizer.synchronize();

  Net reference;
  copy_values(*net, *reference);
  loss_of(reference, Batch::joined(0)).backward();
  const auto expected = reference->named_parameters();
  for (const auto& item : net->named_parameters()) {
    EXPECT_TRUE(near(item.value().grad(), expected[item.key()].grad(), 1e-5)) << item.key();
  }
}

TEST(ZeroGrad, DiscardsReductionsInFlightAndAccumulatedGradients) {
  Net net;
  broadcast_parameters(net);
  SGD inner(net->parameters(), 0.1);
  for (const int passes : {1, 2}) {
    DistributedOptimizer optimizer(inner, net->named_parameters(),
                                   {.backward_passes_per_step = passes});
    for (const bool set_to_none : {true, false}) {
      backward(net, 1);
      optimizer.zero_grad(set_to_none);
      EXPECT_EQ(net->fc1->weight.grad().defined(), !set_to_none);
      for (int pass = 0; pass < passes; ++pass) backward(net, 2 + pass);
      optimizer.synchronize();
      Net reference;
      copy_values(*net, *reference);
      for (int pass = 0; pass < passes; ++pass)
        loss_of(reference, Batch::joined(2 + pass)).backward();
      EXPECT_TRUE(near(net->fc1->weight.grad(), reference->fc1->weight.grad(), 1e-5));
      optimizer.zero_grad();
    }
  }
}

TEST(ZeroGrad, DiscardingWhileRanksUsedDifferentParameters) {
  torch::manual_seed(17);
  torch::nn::Linear common(4, 1), odd(4, 1);
  NamedParameters names;
  for (const auto& item : common->named_parameters())
    names.insert("common." + item.key(), item.value());
  for (const auto& item : odd->named_parameters()) names.insert("odd." + item.key(), item.value());
  SGD inner(names.values(), 0.1);
  DistributedOptimizer optimizer(inner, names);
  const torch::Tensor x = torch::ones({1, 4});
  const auto run = [&](bool branch) {
    torch::Tensor out = common->forward(x);
    if (branch) out = out + odd->forward(x);
    (out.sum() * (rank() + 1)).backward();
  };
  for (const bool by_module : {false, true}) {
    run(rank() % 2 == 1);
    if (by_module) {
      common->zero_grad();
      odd->zero_grad();
    } else {
      optimizer.zero_grad();
    }
    run(rank() % 2 == 0);
    optimizer.synchronize();
    float sum = 0;
    for (int r = 0; r < size(); r += 2) sum += static_cast<float>(r + 1);
    EXPECT_TRUE(near(odd->bias.grad(), torch::tensor({sum / static_cast<float>(size())})));
    EXPECT_TRUE(
        near(common->bias.grad(), torch::tensor({(1.0F + static_cast<float>(size())) / 2})));
    optimizer.zero_grad();
  }
}

TEST(Step, UnderSkipSynchronizeNeedsSynchronizeFirst) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  backward(net);
  {
    const auto guard = optimizer.skip_synchronize();
    EXPECT_TRUE(contains(message_of<UsageError>([&] { optimizer.step(); }), "synchronize()"));
  }
  optimizer.step();
}

TEST(Step, AMismatchLeavesTheParametersAndTheNextStepWorks) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  const torch::Tensor weight = torch::zeros({rank() == 0 ? 2 : 3}, torch::requires_grad());
  const torch::Tensor other = torch::zeros({2}, torch::requires_grad());
  NamedParameters names{{"weight", weight}, {"other", other}};
  SGD inner({weight, other}, 0.1);
  DistributedOptimizer optimizer(inner, names, {.check_every = 0});  // the frozen weight differs
  (weight.sum() + other.sum()).backward();
  EXPECT_TRUE(contains(message_of<MismatchError>([&] { optimizer.step(); }), "weight"));
  EXPECT_TRUE(torch::equal(other, torch::zeros({2})));

  weight.requires_grad_(false);
  optimizer.zero_grad();
  other.sum().backward();
  optimizer.step();
  EXPECT_TRUE(near(other.detach(), torch::full({2}, -0.1F)));
}

TEST(Step, AnErrorOfAnyOperationIsAnErrorOfTheStep) {
  if (size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  NamedParameters names;
  for (const char* const name : {"a", "b", "c"})
    names.insert(name, torch::zeros({2}, torch::requires_grad()));
  SGD inner(names.values(), 0.1);
  DistributedOptimizer optimizer(
      inner, names, {.op = ReduceOp::kSum, .gradient_as_bucket_view = false, .check_every = 0});
  const auto backward_of_all = [&] {
    optimizer.zero_grad();
    (names["a"].sum() + names["b"].sum() + names["c"].sum()).backward();
  };
  backward_of_all();
  optimizer.step();
  // The error is about the middle parameter, at whichever end autograd begins.
  if (rank() == 0) names["b"].set_data(names["b"].detach().to(torch::kFloat64));
  backward_of_all();
  EXPECT_TRUE(contains(message_of<MismatchError>([&] { optimizer.step(); }), ".b'"));
  if (rank() == 0) names["b"].set_data(names["b"].detach().to(torch::kFloat32));
  backward_of_all();
  optimizer.step();
  for (const torch::Tensor& weight : names.values())
    EXPECT_TRUE(near(weight.detach(), torch::full({2}, -0.2F * static_cast<float>(size()))));
}

// The rank does not call the wrapper's zero_grad() either, which would start a new cycle.
TEST(Step, ARankWithoutABackwardTakesPart) {
  const torch::Tensor weight = torch::zeros({2}, torch::requires_grad());
  NamedParameters names{{"weight", weight}};
  SGD inner({weight}, 0.1);
  DistributedOptimizer optimizer(inner, names, {.op = ReduceOp::kSum});
  for (int step = 0; step < 3; ++step) {
    inner.zero_grad();
    if (step != 1 || rank() != 0) (weight * (rank() + 1)).sum().backward();
    optimizer.step();
  }
  const float sum = static_cast<float>(size() * (size() + 1)) / 2;
  EXPECT_TRUE(near(weight.detach(), torch::full({2}, -0.1F * (3 * sum - 1))));
}

TEST(Step, ABackwardAfterSynchronizeIsReducedToo) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  for (const int step : {0, 1, 2}) {
    net->zero_grad();
    backward(net, step);
    optimizer.synchronize();
    Net reference;
    copy_values(*net, *reference);
    loss_of(reference, Batch::joined(step)).backward();
    EXPECT_TRUE(near(net->fc1->weight.grad(), reference->fc1->weight.grad(), 1e-5)) << step;
  }
}

TEST(Hooks, AreGoneAfterDestruction) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.1);
  // A reference to the accumulator keeps its hooks alive.
  const auto accumulator = torch::autograd::impl::grad_accumulator(net->fc1->weight);
  {
    DistributedOptimizer optimizer(inner, net->named_parameters());
    EXPECT_EQ(accumulator->pre_hooks().size(), 1U);
    EXPECT_EQ(accumulator->post_hooks().size(), 1U);
    backward(net);
    optimizer.step();
  }
  EXPECT_TRUE(accumulator->pre_hooks().empty());
  EXPECT_TRUE(accumulator->post_hooks().empty());
  const auto bytes = metrics().bytes;
  backward(net);
  backward(net);
  barrier();
  EXPECT_EQ(metrics().bytes, bytes);
  // A new wrapper of the same optimizer works.
  DistributedOptimizer optimizer(inner, net->named_parameters());
  optimizer.zero_grad();
  backward(net);
  optimizer.step();
}

TEST(Hooks, DestructionInTheMiddleOfAStepNeitherThrowsNorHangs) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.1);
  {
    DistributedOptimizer optimizer(inner, net->named_parameters());
    backward(net);
  }
  DistributedOptimizer optimizer(inner, net->named_parameters());
  optimizer.zero_grad();
  backward(net);
  optimizer.step();
}

// A small gradient goes straight into its bucket, unless the program observes its accumulation.
TEST(Hooks, OfTheProgramSeeEachGradientAsAutogradAddsIt) {
  const torch::Tensor weight = torch::zeros({2}, torch::requires_grad());
  const torch::Tensor other = torch::zeros({2}, torch::requires_grad());
  NamedParameters names{{"weight", weight}, {"other", other}};
  SGD inner({weight, other}, 0.1);
  DistributedOptimizer optimizer(inner, names);
  const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
  std::vector<float> seen;
  accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [&](const auto& outputs, const auto& gradients) {
        seen.push_back(gradients[0].defined() ? gradients[0][0].template item<float>() : -1);
        return outputs;
      }));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    ((weight + other).sum() * (rank() + 1)).backward();
    optimizer.step();
    const torch::Tensor mean = torch::full({2}, static_cast<float>(size() + 1) / 2);
    EXPECT_TRUE(near(weight.grad(), mean)) << step;
    EXPECT_TRUE(near(other.grad(), mean)) << step;
  }
  EXPECT_EQ(seen, std::vector<float>(4, static_cast<float>(rank() + 1)));
  accumulator->post_hooks().pop_back();
}

TEST(Hooks, OfTwoThreadsThatRunBackwardAtOnce) {
  constexpr int kThreads = 2, kEach = 50, kSteps = 20;
  NamedParameters names;
  for (int i = 0; i < kThreads * kEach; ++i)
    names.insert("p" + std::to_string(i), torch::zeros({3}, torch::requires_grad()));
  SGD inner(names.values(), 0.1);
  DistributedOptimizer optimizer(inner, names);
  const auto backward_of = [&](int thread, int step) {
    torch::Tensor sum = torch::zeros({3});
    for (int i = 0; i < kEach; ++i)
      sum = sum + names["p" + std::to_string(thread * kEach + i)] * (i + step + rank());
    sum.sum().backward();
  };
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) threads.emplace_back([&, t] { backward_of(t, step); });
    for (std::thread& thread : threads) thread.join();
    optimizer.step();
    for (int i = 0; i < kThreads * kEach; ++i) {
      const float mean = static_cast<float>(i % kEach + step) + static_cast<float>(size() - 1) / 2;
      EXPECT_TRUE(near(names["p" + std::to_string(i)].grad(), torch::full({3}, mean)))
          << "step " << step << ", parameter " << i;
    }
  }
}

TEST(Hooks, GuardsOutliveTheOptimizer) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.1);
  auto optimizer = std::make_unique<DistributedOptimizer>(inner, net->named_parameters());
  const auto no_sync = optimizer->no_sync();
  const auto skip = optimizer->skip_synchronize();
  optimizer.reset();
}

/// Returns x; its backward waits until `done` is true.
struct WaitInBackward : torch::autograd::Function<WaitInBackward> {
  static inline std::function<bool()> done;
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!done()) {
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "nothing was reduced while backward ran";
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return {gradients[0]};
  }
};

TEST(Overlap, TheLastLayersAreReducedBeforeTheFirstLayersGradientIsReady) {
  torch::manual_seed(17);
  torch::nn::Linear first(4, 8), last(8, 1);
  NamedParameters names;
  for (const auto& item : first->named_parameters())
    names.insert("first." + item.key(), item.value());
  for (const auto& item : last->named_parameters())
    names.insert("last." + item.key(), item.value());
  SGD inner(names.values(), 0.1);
  DistributedOptimizer optimizer(inner, names);
  for (int step = 0; step < 4; ++step) {
    const auto before = metrics().completed_operations;
    // In the first step gradients are not sent before the ranks have compared their parameters.
    WaitInBackward::done = [before, step] {
      return step == 0 || metrics().completed_operations >= before + 2;
    };
    optimizer.zero_grad();
    const torch::Tensor hidden = WaitInBackward::apply(first->forward(torch::ones({2, 4})));
    last->forward(hidden).sum().backward();
    EXPECT_TRUE(WaitInBackward::done());
    optimizer.step();
  }
}

}  // namespace
}  // namespace hvd::testing
