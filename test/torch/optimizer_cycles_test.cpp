// Tests steps that do not have exactly one backward pass with a gradient of each parameter:
// gradients that stay undefined, more passes after the reduction, resets, and nan.
#include <cmath>
#include <functional>
#include <limits>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using torch::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::optim::SGD;

/// Computes x * w. Its backward may leave the gradient of w undefined, like a gate without tokens.
struct Gate : torch::autograd::Function<Gate> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& w, bool give) {
    context->save_for_backward({x, w});
    context->saved_data["give"] = give;
    return x * w;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const variable_list saved = context->get_saved_variables();
    Tensor of_w;
    if (context->saved_data["give"].toBool()) of_w = (gradients[0] * saved[0]).sum(0);
    return {gradients[0] * saved[1], of_w, Tensor()};
  }
};

/// A layer followed by a gate, which backward reaches first.
struct Gated {
  torch::nn::Linear layer{nullptr};
  Tensor w = torch::ones({4}, torch::requires_grad());
  NamedParameters named;
  Gated() {
    torch::manual_seed(1);
    layer = torch::nn::Linear(3, 4);
    named = layer->named_parameters();
    named.insert("w", w);
    broadcast_parameters(named);
  }
  void backward(bool give) {
    const Tensor x = torch::full({2, 3}, 1.0 + rank());
    Gate::apply(layer->forward(x), w, give).sum().backward();
  }
};

/// The average of Gated's inputs over the ranks.
double mean_input() { return static_cast<double>(size() + 1) / 2; }

/// @param gives whether this rank's gate gives a gradient in this step
void train_with_gate(const DistributedOptimizerOptions& options,
                     const std::function<bool(int step)>& gives,
                     const std::function<bool(int step)>& any_gives) {
  Gated net;
  SGD inner(net.named.values(), 0.1);
  DistributedOptimizer optimizer(inner, net.named, options);
  for (int step = 0; step < 6; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    optimizer.zero_grad();
    const std::uint64_t before = metrics().completed_operations;
    const Tensor w = net.w.detach().clone();
    net.backward(gives(step));
    optimizer.step();
    if (step > 0) {
      EXPECT_LE(metrics().completed_operations - before, 4U) << "the step was reduced twice";
    }
    EXPECT_TRUE(near(net.layer->bias.grad(), 2 * w));
    EXPECT_TRUE(near(net.layer->weight.grad(),
                     (2 * mean_input() * w).to(torch::kFloat32).view({4, 1}).expand({4, 3})));
    EXPECT_EQ(net.w.grad().defined(), any_gives(step));
    EXPECT_TRUE(same_on_all_ranks(net.named.values()));
  }
}

TEST(UndefinedGradients, OnOneRankCountAsZeros) {
  for (const bool views : {true, false}) {
    for (const int from : {0, 2}) {
      const auto none = [&](int step) { return step >= from && rank() == size() - 1; };
      train_with_gate(
          {.gradient_as_bucket_view = views}, [&](int step) { return !none(step); },
          [&](int step) { return size() > 1 || step < from; });
    }
  }
}

TEST(UndefinedGradients, OnAllRanksLeaveTheGradientUndefined) {
  for (const bool views : {true, false}) {
    const auto none = [](int) { return false; };
    train_with_gate({.gradient_as_bucket_view = views}, none, none);
  }
}

// After a pass that leaves no gradient, the next pass does not count as the first.
TEST(UndefinedGradients, CountAsAPass) {
  Gated net;
  SGD inner(net.named.values(), 0.1);
  DistributedOptimizer optimizer(inner, net.named, {.backward_passes_per_step = 2});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net.backward(false);
    net.backward(true);
    EXPECT_TRUE(contains(message_of<UsageError>([&] { net.backward(true); }), "'w'"));
    optimizer.step();
    EXPECT_TRUE(same_on_all_ranks(net.named.values()));
  }
}

// A reset is detected by a gradient that was defined before.
TEST(UndefinedGradients, DoNotHideAReset) {
  Gated net;
  SGD inner(net.named.values(), 0.0);
  DistributedOptimizer optimizer(inner, net.named);
  for (int step = 0; step < 3; ++step) {
    inner.zero_grad();
    net.backward(rank() > 0);
    inner.zero_grad();
    net.backward(rank() > 0);
    optimizer.step();
    EXPECT_TRUE(near(net.layer->bias.grad(), torch::full({4}, 2.0F)));
  }
}

/// Two parameters; backward() gives both, or only `often`, the gradient `factor` * (rank + 1).
struct Slope {
  Tensor often = torch::zeros({5}, torch::requires_grad());
  Tensor seldom = torch::zeros({3}, torch::requires_grad());
  NamedParameters named;
  Slope() {
    named.insert("often", often);
    named.insert("seldom", seldom);
  }
  void backward(double factor, bool both = true) {
    const double slope = factor * (1 + rank());
    Tensor loss = (often * slope).sum();
    if (both) loss = loss + (seldom * slope).sum();
    loss.backward();
  }
  void expect(double of_often, double of_seldom) {
    EXPECT_TRUE(near(often.grad(), torch::full({5}, of_often)));
    EXPECT_TRUE(near(seldom.grad(), torch::full({3}, of_seldom)));
  }
};

/// The reduced gradient for factor 1.
double whole(ReduceOp op) {
  const double sum = size() * (size() + 1) / 2.0;
  return op == ReduceOp::kSum ? sum : sum / size();
}

/// Runs a test with a net and its optimizer, for both operations, with and without buckets.
void for_sums_and_averages(const std::function<void(Slope&, DistributedOptimizer&,
                                                    const DistributedOptimizerOptions&)>& test) {
  for (const bool views : {true, false}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
      SCOPED_TRACE(std::string(to_string(op)) + (views ? ", in buckets" : ""));
      Slope net;
      SGD inner(net.named.values(), 0.0);
      const DistributedOptimizerOptions options{.op = op, .gradient_as_bucket_view = views};
      DistributedOptimizer optimizer(inner, net.named, options);
      test(net, optimizer, options);
    }
  }
}

TEST(PassesAfterTheReduction, AddToItOnce) {
  for_sums_and_averages(
      [](Slope& net, DistributedOptimizer& optimizer, const DistributedOptimizerOptions& options) {
        const double one = whole(options.op);
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          net.backward(1);
          EXPECT_NEAR(optimizer.clip_grad_norm_(1e9), std::sqrt(8.0) * one, 1e-4);
          net.backward(10);
          optimizer.synchronize();
          net.expect(11 * one, 11 * one);
          {
            const auto guard = optimizer.no_sync();
            net.backward(100);
          }
          optimizer.step();
          net.expect(111 * one, 111 * one);
        }
      });
}

TEST(PassesAfterTheReduction, WhichReachAParameterOnSomeRanksOrNone) {
  for_sums_and_averages(
      [](Slope& net, DistributedOptimizer& optimizer, const DistributedOptimizerOptions& options) {
        const double one = whole(options.op);
        const double of_first = options.op == ReduceOp::kSum ? 1 : 1.0 / size();
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          net.backward(1);
          optimizer.synchronize();
          net.backward(10, rank() == 0);
          optimizer.synchronize();
          net.expect(11 * one, one + 10 * of_first);
          torch::nn::utils::clip_grad_value_(net.named.values(), 0.5);
          net.backward(10, false);
          optimizer.synchronize();
          net.expect(0.5 + 10 * one, 0.5);
          {
            const torch::NoGradGuard no_grad;
            for (const Tensor& parameter : net.named.values()) parameter.mutable_grad().fill_(2);
          }
          net.backward(10, false);
          optimizer.synchronize();
          net.expect(2 + 10 * one, 2);
        }
      });
}

// The program accumulates gradients over several steps.
TEST(PassesAfterTheReduction, InTheNextStepWithoutZeroGrad) {
  for_sums_and_averages(
      [](Slope& net, DistributedOptimizer& optimizer, const DistributedOptimizerOptions& options) {
        for (int step = 1; step < 5; ++step) {
          net.backward(1);
          optimizer.step();
          net.expect(step * whole(options.op), step * whole(options.op));
        }
        optimizer.step();  // without any backward
        net.expect(4 * whole(options.op), 4 * whole(options.op));
        for (const bool to_none : {true, false}) {
          optimizer.inner().zero_grad(to_none);
          net.backward(1);
          optimizer.step();
          net.expect(whole(options.op), whole(options.op));
        }
      });
}

// Without a backward pass, `.grad` is a gradient of the program, although it held a result before.
TEST(PassesAfterTheReduction, GradientsWrittenWithoutAPassAreReduced) {
  for_sums_and_averages(
      [](Slope& net, DistributedOptimizer& optimizer, const DistributedOptimizerOptions& options) {
        net.backward(1);
        optimizer.step();
        for (int step = 1; step < 4; ++step) {
          const torch::NoGradGuard no_grad;
          for (const Tensor& parameter : net.named.values())
            parameter.mutable_grad().fill_(static_cast<double>(step * (1 + rank())));
          optimizer.step();
          net.expect(step * whole(options.op), step * whole(options.op));
        }
      });
}

TEST(PassesAfterTheReduction, GradientsWrittenAfterZeroGradAreReduced) {
  for_sums_and_averages(
      [](Slope& net, DistributedOptimizer& optimizer, const DistributedOptimizerOptions& options) {
        net.backward(1);
        optimizer.step();
        for (int step = 1; step < 4; ++step) {
          optimizer.zero_grad(/*set_to_none=*/false);
          {
            const torch::NoGradGuard no_grad;
            net.seldom.mutable_grad().fill_(static_cast<double>(step * (1 + rank())));
          }
          net.backward(1, false);
          optimizer.step();
          net.expect(whole(options.op), step * whole(options.op));
        }
      });
}

// The parameter that came first in the previous step has no gradient in this step. So another
// parameter must show the reset.
TEST(Resets, AreNoticedByTheFirstGradientOfTheStep) {
  Slope net;
  SGD inner(net.named.values(), 0.0);
  DistributedOptimizer optimizer(inner, net.named);
  for (int step = 0; step < 3; ++step) {
    inner.zero_grad();
    net.backward(1);
    optimizer.step();
    inner.zero_grad();
    net.backward(1, false);
    inner.zero_grad();
    net.backward(10, false);
    optimizer.step();
    EXPECT_TRUE(near(net.often.grad(), torch::full({5}, 10 * whole(ReduceOp::kAverage))));
    EXPECT_FALSE(net.seldom.grad().defined());
  }
}

TEST(PassesAfterTheReduction, OfSparseGradients) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(10, 3).sparse(true));
    broadcast_parameters(net);
    SGD inner(net->parameters(), 0.0);
    DistributedOptimizer optimizer(inner, net, {.op = op});
    const auto pass = [&](double factor) {
      (net->forward(torch::tensor({1, 2 + rank()})) * factor).sum().backward();
    };
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      pass(1);
      optimizer.synchronize();
      pass(10);
      optimizer.synchronize();
      const double contributions = op == ReduceOp::kSum ? size() : 1;
      const Tensor dense = net->weight.grad().to_dense();
      EXPECT_TRUE(near(dense[1], torch::full({3}, 11 * contributions)));
      EXPECT_TRUE(near(dense[2], torch::full({3}, 11 * contributions / size())));
    }
  }
}

// The gradients of a head are reset, while those of the body must add up.
TEST(PassesAfterTheReduction, WhereSomeGradientsWereReset) {
  for_sums_and_averages([](Slope& net, DistributedOptimizer& optimizer,
                           const DistributedOptimizerOptions& options) {
    const double one = whole(options.op);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      net.backward(100);
      optimizer.synchronize();
      net.backward(1);
      net.seldom.mutable_grad().reset();  // backward reaches it first, since it is last in forward
      net.backward(10);
      optimizer.step();
      net.expect(111 * one, 10 * one);
    }
  });
}

// The step is skipped without an error.
TEST(NotANumber, InASparseGradientSkipsTheStep) {
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  broadcast_parameters(net);
  SGD inner(net->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net);
  GradScaler scaler;
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    Tensor loss = net->forward(torch::tensor({1, 2})).sum();
    if (step % 2 == 1 && rank() == size() - 1)
      loss = loss * std::numeric_limits<float>::quiet_NaN();
    scaler.scale(loss).backward();
    EXPECT_EQ(scaler.step(optimizer), step % 2 == 0);
    scaler.update();
  }
  EXPECT_TRUE(torch::isfinite(net->weight).all().item<bool>());
  EXPECT_TRUE(same_on_all_ranks(net->weight));
}

// The ranks agree that the gradients are not finite, so no rank compares parameters in that cycle.
TEST(OneRankDropsACycle, InWhichGradientsAreNotFinite) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  Gated net;
  SGD inner(net.named.values(), 0.0);
  DistributedOptimizer optimizer(inner, net.named, {.error_if_nonfinite = true});
  const Tensor x = torch::full({2, 3}, rank() == 0 ? std::numeric_limits<double>::quiet_NaN() : 1.0,
                               torch::kFloat32);
  Gate::apply(net.layer->forward(x), net.w, true).sum().backward();
  if (rank() == 0)
    optimizer.zero_grad();
  else
    EXPECT_THROW(optimizer.step(), NonFiniteError);
  optimizer.zero_grad();
  for (int step = 0; step < 3; ++step) {
    net.backward(true);
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_EQ(allreduce(torch::ones({1}), {.op = ReduceOp::kSum}).item<float>(), size());
}

}  // namespace
}  // namespace hvd::testing
