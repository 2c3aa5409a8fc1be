// Tests mistakes in the use of a DistributedOptimizer that would silently make the ranks train
// different models, or with wrong values.
#include <c10/util/Exception.h>

#include <functional>
#include <limits>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using torch::nn::utils::clip_grad_norm_;
using torch::nn::utils::clip_grad_value_;
using torch::optim::SGD;

void expect_equal_models(Net& actual, Net& expected, double tolerance = 1e-5) {
  const auto b = expected->named_parameters();
  for (const auto& item : actual->named_parameters())
    EXPECT_TRUE(near(item.value(), b[item.key()], tolerance)) << item.key();
  EXPECT_TRUE(same_on_all_ranks(actual->parameters()));
}

/// Runs a test with buckets, which exist from the second step on, and without buckets.
void with_and_without_buckets(const std::function<void(const DistributedOptimizerOptions&)>& test) {
  for (const bool views : {true, false})
    test({.op = ReduceOp::kSum, .gradient_as_bucket_view = views});
}

// Gradients between backward() and step().

TEST(GradientsInFlight, ClippingThemIsAnErrorThatShowsTheOrder) {
  with_and_without_buckets([](const DistributedOptimizerOptions& options) {
    Net net = same_net(), serial;
    copy_values(*net, *serial);
    SGD inner(net->parameters(), 0.05), reference(serial->parameters(), 0.05);
    DistributedOptimizer optimizer(inner, net->named_parameters(), options);
    const std::vector<std::function<void()>> clips = {
        [&] { clip_grad_norm_(net->parameters(), 0.1); },
        [&] { clip_grad_norm_(net->parameters(), 0.1, std::numeric_limits<double>::infinity()); },
        [&] { clip_grad_value_(net->parameters(), 1e-3); }};
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      scale_loss(loss_of(net, Batch::of_rank(rank(), step))).backward();
      for (const auto& clip : clips) {
        const std::string message = message_of<UsageError>(clip);
        EXPECT_TRUE(contains(message, "synchronize()")) << message;
        EXPECT_TRUE(contains(message, "'fc1.weight'")) << message;
      }
      optimizer.step();
      reference.zero_grad();
      loss_of(serial, Batch::joined(step)).backward();
      reference.step();
    }
    expect_equal_models(net, serial);  // no harm was done
  });
}

TEST(GradientsInFlight, AreFinalAfterSynchronizeAndOfNoInterestUnderNoSync) {
  with_and_without_buckets([](DistributedOptimizerOptions options) {
    Net net = same_net();
    SGD inner(net->parameters(), 0.05);
    options.backward_passes_per_step = 2;
    DistributedOptimizer optimizer(inner, net->named_parameters(), options);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      {
        const auto guard = optimizer.no_sync();
        backward(net, 10 + step);
      }
      clip_grad_norm_(net->parameters(), 0.1);  // this rank's own gradients, not reduced yet
      backward(net, 20 + step);
      clip_grad_value_(net->parameters(), 0.1);
      backward(net, 30 + step);
      EXPECT_THROW(clip_grad_norm_(net->parameters(), 0.1), UsageError);
      optimizer.synchronize();
      clip_grad_norm_(net->parameters(), 0.1);
      clip_grad_value_(net->parameters(), 0.01);
      EXPECT_LE(net->fc1->weight.grad().abs().max().item<float>(), 0.01F);
      optimizer.step();
      EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    }
  });
}

/// Uses `branch` on one rank only.
struct BranchesImpl : torch::nn::Module {
  torch::nn::Linear always{nullptr}, branch{nullptr};
  BranchesImpl()
      : always(register_module("always", torch::nn::Linear(4, 2))),
        branch(register_module("branch", torch::nn::Linear(4, 2))) {}
  torch::Tensor loss(const Batch& batch, bool with_branch) {
    torch::Tensor out = always->forward(batch.x);
    if (with_branch) out = out + branch->forward(batch.x);
    return torch::mse_loss(out, batch.y);
  }
};

TEST(GradientsInFlight, TheOptimizersOwnClippingIsThatOfOneProcessThoughAParameterIsUnusedOnARank) {
  for (const bool by_norm : {true, false}) {
    with_and_without_buckets([&](const DistributedOptimizerOptions& options) {
      torch::manual_seed(5);
      auto net = std::make_shared<BranchesImpl>(), serial = std::make_shared<BranchesImpl>();
      broadcast_parameters(net);
      copy_values(*net, *serial);
      SGD inner(net->parameters(), 0.05), reference(serial->parameters(), 0.05);
      DistributedOptimizer optimizer(inner, net->named_parameters(), options);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        scale_loss(net->loss(Batch::of_rank(rank(), step), rank() == step % size())).backward();
        EXPECT_THROW(clip_grad_norm_(net->parameters(), 0.1), UsageError);
        reference.zero_grad();
        torch::Tensor joined = torch::zeros({});
        for (int r = 0; r < size(); ++r)
          joined = joined + serial->loss(Batch::of_rank(r, step), r == step % size()) / size();
        joined.backward();
        if (by_norm) {
          EXPECT_NEAR(optimizer.clip_grad_norm_(0.1), clip_grad_norm_(serial->parameters(), 0.1),
                      1e-5);
        } else {
          optimizer.clip_grad_value_(0.02);
          clip_grad_value_(serial->parameters(), 0.02);
        }
        optimizer.step();
        reference.step();
      }
      const auto expected = serial->named_parameters();
      for (const auto& item : net->named_parameters())
        EXPECT_TRUE(near(item.value(), expected[item.key()], 1e-5)) << item.key();
      EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    });
  }
}

TEST(GradientsInFlight, WritingToThemIsAnErrorFromStepWhichLeavesTheParameters) {
  with_and_without_buckets([](const DistributedOptimizerOptions& options) {
    Net net = same_net();
    SGD inner(net->parameters(), 0.05);
    DistributedOptimizer optimizer(inner, net->named_parameters(), options);
    for (int step = 0; step < 3; ++step) {
      const torch::Tensor before = net->fc2->bias.detach().clone();
      optimizer.zero_grad();
      backward(net, step);
      {
        const torch::NoGradGuard no_grad;
        net->norm->weight.mutable_grad().mul_(0.5);
      }
      const std::string message = message_of<UsageError>([&] { optimizer.step(); });
      EXPECT_TRUE(contains(message, "'norm.weight'")) << message;
      EXPECT_TRUE(contains(message, "synchronize()")) << message;
      EXPECT_TRUE(torch::equal(before, net->fc2->bias));
      train_step(net, optimizer, step);
      EXPECT_TRUE(same_on_all_ranks(net->parameters()));
    }
  });
}

TEST(GradientsInFlight, ASparseOneThatWasWrittenToIsNoticedToo) {
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  broadcast_parameters(net);
  SGD inner(net->parameters(), 0.1);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(torch::tensor({(rank() + step) % 10, 9})).sum().backward();
    {
      const torch::NoGradGuard no_grad;
      net->weight.grad()._values().mul_(0.5);
    }
    EXPECT_TRUE(contains(message_of<UsageError>([&] { optimizer.step(); }), "'weight'"));
    optimizer.zero_grad();
    net->forward(torch::tensor({(rank() + step) % 10, 9})).sum().backward();
    optimizer.step();
  }
  EXPECT_TRUE(same_on_all_ranks(net->weight));
}

TEST(GradientsInFlight, StepOfTheWrappedSgdIsAnError) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  const torch::Tensor before = net->fc1->weight.detach().clone();
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    backward(net, step);
    EXPECT_TRUE(contains(message_of<UsageError>([&] { inner.step(); }),
                         "step() of the DistributedOptimizer"));
    if (step == 0) {
      EXPECT_TRUE(torch::equal(before, net->fc1->weight));
    }
    optimizer.step();
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

TEST(GradientsInFlight, AnOptimizerThatIsDestroyedLeavesThemToTheProgram) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  {
    DistributedOptimizer optimizer(inner, net->named_parameters());
    backward(net, 0);
  }
  EXPECT_NO_THROW(clip_grad_norm_(net->parameters(), 0.1));
}

class CountWarnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    count += contains(warning.msg(), wanted) ? 1 : 0;
  }
  std::string wanted = "dropped";
  int count = 0;
};

// The wrapper went out of scope, and the wrapped optimizer continues alone.
TEST(AnOptimizerThatIsDestroyed, WithoutHavingReducedAnythingWarnsOnlyIfTrainingFollows) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  CountWarnings warnings;
  warnings.wanted = "";
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  {
    DistributedOptimizer optimizer(inner, net->named_parameters());
    const torch::NoGradGuard no_grad;  // the program only evaluates
    net->forward(Batch::of_rank(rank(), 0).x);
  }
  EXPECT_EQ(warnings.count, 0);
  for (int step = 0; step < 5; ++step) train_step(net, inner, step);
  EXPECT_EQ(warnings.count, size() == 1 ? 0 : 1);
  broadcast_parameters(net);
}

TEST(GradientsInFlight, DroppedManyTimesInARowTheyAreWorthAWarning) {
  Net net = same_net();
  torch::optim::Adam inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net->named_parameters(), {.check_every = 0});
  CountWarnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (int step = 0; step < 12; ++step) {
    optimizer.zero_grad();
    backward(net, step);
    step % 3 == 2 ? static_cast<void>(optimizer.step()) : static_cast<void>(inner.step());
  }
  EXPECT_EQ(warnings.count, 0) << "as in a GAN";
  for (int step = 0; step < 12; ++step) {
    optimizer.zero_grad();
    backward(net, step);
    inner.step();  // Adam does not call data() of a gradient, which would throw
  }
  EXPECT_EQ(warnings.count, 1);
  optimizer.zero_grad();
}

// Parameters.

TEST(Parameters, AddedToTheOptimizerLaterAreAnError) {
  Net net = same_net();
  SGD inner(net->fc1->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  backward(net, 0);
  optimizer.step();
  const torch::Tensor before = net->fc2->weight.detach().clone();
  inner.add_param_group(torch::optim::OptimizerParamGroup(net->fc2->parameters()));
  for (const auto& call : std::vector<std::function<void()>>{[&] { optimizer.zero_grad(); },
                                                             [&] { optimizer.step(); }}) {
    const std::string message = message_of<UsageError>(call);
    EXPECT_TRUE(contains(message, "'fc2.weight'")) << message;
    EXPECT_TRUE(contains(message, "add_param_group")) << message;
    EXPECT_TRUE(contains(message, "group 1")) << message;
  }
  EXPECT_TRUE(torch::equal(before, net->fc2->weight));
}

TEST(Parameters, OfTwoWrappedOptimizersAreAnErrorWhileBothLive) {
  Net net = same_net();
  torch::optim::Adam adam(net->parameters(), 0.05);
  SGD sgd(net->fc2->parameters(), 0.05);
  {
    DistributedOptimizer first(adam, net->named_parameters());
    const std::string message =
        message_of<UsageError>([&] { DistributedOptimizer second(sgd, net->named_parameters()); });
    EXPECT_TRUE(contains(message, "'fc2.weight'")) << message;
    EXPECT_TRUE(contains(message, "another DistributedOptimizer")) << message;
    backward(net, 0);
    first.step();
  }
  DistributedOptimizer second(sgd, net->named_parameters());
  second.zero_grad();
  net->zero_grad();
  backward(net, 1);
  second.step();
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

TEST(Parameters, WhoseGradientsShareMemoryAreReducedOnce) {
  const auto loss_of_both = [](const torch::Tensor& a, const torch::Tensor& b, float factor) {
    return ((a.view(-1) + b.view(-1)) * factor).sum();
  };
  {
    const torch::Tensor a = torch::zeros({2, 3}, torch::requires_grad()),
                        b = torch::zeros({3, 2}, torch::requires_grad());
    loss_of_both(a, b, 1).backward();
    EXPECT_TRUE(a.grad().is_alias_of(b.grad()))
        << "autograd gives each its own: this test tests nothing";
  }
  with_and_without_buckets([&](const DistributedOptimizerOptions& options) {
    const torch::Tensor a = torch::zeros({2, 3}, torch::requires_grad()),
                        b = torch::zeros({3, 2}, torch::requires_grad());
    NamedParameters named{{"a", a}, {"b", b}};
    SGD inner(named.values(), 0.1);
    DistributedOptimizer optimizer(inner, named, options);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      loss_of_both(a, b, static_cast<float>(rank() + 1)).backward();
      optimizer.synchronize();
      const float sum = static_cast<float>(size() * (size() + 1)) / 2;
      EXPECT_TRUE(near(a.grad(), torch::full({2, 3}, sum))) << step;
      EXPECT_TRUE(near(b.grad(), torch::full({3, 2}, sum))) << step;
    }
  });
  const torch::Tensor a = torch::zeros({2, 3}, torch::requires_grad()),
                      b = torch::zeros({3, 2}, torch::requires_grad());
  loss_of_both(a, b, 1).backward();
  all_reduce({a, b});
  EXPECT_TRUE(near(a.grad(), torch::full({2, 3}, static_cast<float>(size()))));
  EXPECT_TRUE(near(b.grad(), torch::full({3, 2}, static_cast<float>(size()))));
}

TEST(Parameters, WhoseGradientsShareMemoryOnOneRankGetTheirOwnResults) {
  for (const std::int64_t rows : {3, 100'000}) {
    const auto run = [rows](const auto& reduce) {
      const torch::Tensor a = torch::zeros({rows, 2}, torch::requires_grad()),
                          b = torch::zeros({2, rows}, torch::requires_grad());
      reduce(NamedParameters{{"a", a}, {"b", b}},
             [&] { (rank() == 0 ? (a.view(-1) + b.view(-1)).sum() : a.sum()).backward(); });
      EXPECT_TRUE(near(a.grad(), torch::full({rows, 2}, static_cast<float>(size())))) << rows;
      EXPECT_TRUE(near(b.grad(), torch::ones({2, rows}))) << rows;
    };
    with_and_without_buckets([&](const DistributedOptimizerOptions& options) {
      for (const int steps : {1, 3}) {
        run([&](const NamedParameters& named, const auto& backward) {
          SGD inner(named.values(), 0.1);
          DistributedOptimizer optimizer(inner, named, options);
          for (int step = 0; step < steps; ++step) {
            optimizer.zero_grad();
            backward();
            optimizer.synchronize();
          }
        });
      }
    });
    run([](const NamedParameters& named, const auto& backward) {
      backward();
      all_reduce(named.values());
    });
  }
}

TEST(Parameters, WithOneTensorAsTheirGradientsGetTheirOwnResults) {
  with_and_without_buckets([&](const DistributedOptimizerOptions& options) {
    const torch::Tensor a = torch::zeros({3}, torch::requires_grad()),
                        b = torch::zeros({3}, torch::requires_grad());
    NamedParameters named{{"a", a}, {"b", b}};
    SGD inner(named.values(), 0.1);
    DistributedOptimizer optimizer(inner, named, options);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      a.mutable_grad() = torch::ones({3});
      if (rank() == 0) b.mutable_grad() = a.grad();
      optimizer.synchronize();
      EXPECT_TRUE(near(a.grad(), torch::full({3}, static_cast<float>(size())))) << step;
      EXPECT_TRUE(near(b.grad(), torch::ones({3}))) << step;
    }
  });
}

// Steps.

TEST(StepWithAClosure, UnderSkipSynchronizeNeedsSynchronizeInTheClosure) {
  Net net = same_net(), serial;
  copy_values(*net, *serial);
  SGD inner(net->parameters(), 0.05), reference(serial->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    const auto guard = optimizer.skip_synchronize();
    optimizer.zero_grad();
    const auto closure = [&](bool synchronize) {
      return optimizer.step([&, synchronize] {
        optimizer.zero_grad();
        torch::Tensor loss = loss_of(net, Batch::of_rank(rank(), step));
        loss.backward();
        if (synchronize) optimizer.synchronize();
        return loss;
      });
    };
    const std::string message = message_of<UsageError>([&] { closure(false); });
    EXPECT_TRUE(contains(message, "synchronize()")) << message;
    optimizer.zero_grad();
    closure(true);
    reference.zero_grad();
    loss_of(serial, Batch::joined(step)).backward();
    reference.step();
  }
  expect_equal_models(net, serial);
}

// Adam does not call data() of a gradient, which would throw. So it would use these gradients.
TEST(StepWithAClosure, UnderSkipSynchronizeLeavesTheParametersIfGradientsAreInFlight) {
  Net net = same_net();
  torch::optim::Adam inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  const torch::Tensor before = net->fc1->weight.detach().clone();
  const auto guard = optimizer.skip_synchronize();
  const auto without_synchronize = [&] {
    torch::Tensor loss = loss_of(net, Batch::of_rank(rank(), 0));
    loss.backward();
    return loss;
  };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { optimizer.step(without_synchronize); }),
                       "when the closure returns"));
  EXPECT_TRUE(torch::equal(before, net->fc1->weight));
  optimizer.zero_grad();
}

TEST(CreateGraph, IsRefusedUnlessUnderNoSync) {
  Net net = same_net();
  SGD inner(net->parameters(), 0.05);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = loss_of(net, Batch::of_rank(rank(), step));
    EXPECT_TRUE(
        contains(message_of<UsageError>([&] { loss.backward({}, true, /*create_graph=*/true); }),
                 "create_graph"));
    for (const torch::Tensor& parameter : net->parameters())
      EXPECT_FALSE(parameter.grad().defined()) << "it was refused too late";
    {
      const auto guard = optimizer.no_sync();
      loss.backward({}, true, true);
    }
    const torch::Tensor held = net->fc2->bias.grad();
    EXPECT_TRUE(held.requires_grad());
    EXPECT_TRUE(contains(message_of<UsageError>([&] { optimizer.step(); }), "detach_()"));
    optimizer.zero_grad();
    EXPECT_FALSE(held.requires_grad()) << "zero_grad() detaches a gradient that has a graph";
    loss.backward();
    optimizer.step();
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

TEST(AllReduceOfParameters, IsAnErrorForALoss) {
  const torch::Tensor weight = torch::ones({3}, torch::requires_grad());
  const torch::Tensor loss = (weight * 2).sum();
  EXPECT_TRUE(contains(message_of<UsageError>([&] { all_reduce({loss}); }), "hvd::allreduce"));
  EXPECT_TRUE(
      contains(message_of<UsageError>([&] { all_reduce({loss.detach()}); }), "hvd::allreduce"));
  loss.backward();
  all_reduce({torch::zeros({2}), weight});  // a frozen tensor and a trained one
  EXPECT_TRUE(near(weight.grad(), torch::full({3}, 2.0F * static_cast<float>(size()))));
}

}  // namespace
}  // namespace hvd::testing
