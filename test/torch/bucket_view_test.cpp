// Gradients as views into buckets. Whatever a program does with them, the results equal those of
// gradients that are sent one by one.
#include <functional>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

/// Runs one step of a training loop.
using Step = std::function<void(Net&, SGD&, DistributedOptimizer&, int step)>;

/// The reason why this job has no buckets; null if it has.
const char* no_buckets() { return size() == 1 ? "one rank does not reduce" : nullptr; }

/// Runs the same program with and without views. Both must end with the same parameters, bit for
/// bit.
void expect_equal_with_views(const Step& run, DistributedOptimizerOptions options = {}) {
  std::vector<std::vector<torch::Tensor>> results;
  for (const bool views : {true, false}) {
    Net net = same_net();
    SGD sgd(net->parameters(), SGDOptions(0.05).momentum(0.9));
    options.gradient_as_bucket_view = views;
    DistributedOptimizer optimizer(sgd, net->named_parameters(), options);
    for (int step = 0; step < 6; ++step) run(net, sgd, optimizer, step);
    results.push_back(net->parameters());
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  }
  for (std::size_t i = 0; i < results[0].size(); ++i)
    EXPECT_TRUE(torch::equal(results[0][i], results[1][i])) << "parameter " << i;
}

TEST(BucketViews, GradientsLieSideBySideFromTheSecondStepOn) {
  if (const char* const why = no_buckets()) GTEST_SKIP() << why;
  Net net = same_net();
  SGD sgd(net->parameters(), SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, net->named_parameters());
  std::vector<void*> places;
  for (int step = 0; step < 4; ++step) {
    train_step(net, optimizer, step);
    if (step == 0) continue;
    std::vector<void*> now;
    for (const auto& parameter : net->parameters()) now.push_back(parameter.grad().data_ptr());
    if (places.empty()) places = now;
    EXPECT_EQ(places, now) << "step " << step;
  }
}

std::uint64_t operations_of_a_step(const DistributedOptimizerOptions& options) {
  torch::nn::Sequential layers;
  for (int i = 0; i < 64; ++i) layers->push_back(torch::nn::Linear(8, 8));
  broadcast_parameters(layers);
  SGD sgd(layers->parameters(), SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, layers->named_parameters(), options);
  std::uint64_t before = 0;
  for (int step = 0; step < 3; ++step) {
    before = metrics().completed_operations;
    optimizer.zero_grad();
    layers->forward(torch::ones({2, 8})).sum().backward();
    optimizer.step();
  }
  return metrics().completed_operations - before;
}

TEST(BucketViews, AStepOfManyTensorsIsFewOperations) {
  if (const char* const why = no_buckets()) GTEST_SKIP() << why;
  for (const Compression compression : {Compression::kNone, Compression::kFloat16}) {
    const std::uint64_t operations = operations_of_a_step({.compression = compression});
    EXPECT_GE(operations, 8U) << "some are reduced while backward runs";
    EXPECT_LE(operations, 12U) << "of 128 tensors";
  }
}

TEST(BucketViews, BucketsThatTravelAs16BitsChangeNothing) {
  const auto run = [](Net& net, SGD&, DistributedOptimizer& optimizer, int step) {
    optimizer.zero_grad(step % 2 == 0);
    backward(net, step);
    optimizer.step();
  };
  expect_equal_with_views(run, {.compression = Compression::kFloat16});
  expect_equal_with_views(run,
                          {.compression = Compression::kBFloat16, .gradient_predivide_factor = 3});
}

TEST(BucketViews, DoublesThatAreCastByLibTorchTravelOneByOne) {
  if (const char* const why = no_buckets()) GTEST_SKIP() << why;
  torch::nn::Sequential layers(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  layers->to(torch::kFloat64);
  broadcast_parameters(layers);
  SGD sgd(layers->parameters(), SGDOptions(0.05));
  DistributedOptimizer optimizer(sgd, layers->named_parameters(),
                                 {.compression = Compression::kFloat16});
  for (int step = 0; step < 3; ++step) {
    const std::uint64_t before = metrics().completed_operations;
    optimizer.zero_grad();
    layers->forward(torch::ones({2, 4}, torch::kFloat64)).sum().backward();
    optimizer.step();
    const std::uint64_t once = step == 0 ? 3 : 0;  // parameters' names, layouts and values
    EXPECT_EQ(metrics().completed_operations - before, 5U + once)
        << "four gradients and which of them there are";
    EXPECT_EQ(layers->parameters()[0].grad().scalar_type(), torch::kFloat64);
  }
}

TEST(BucketViews, OtherGradientsAreReducedBesideTheBuckets) {
  // A sparse gradient, a group, complex numbers, and a parameter that has no gradient at first.
  for (const bool views : {true, false}) {
    torch::manual_seed(11);
    torch::nn::Sequential layers;
    for (int i = 0; i < 16; ++i) layers->push_back(torch::nn::Linear(8, 8));
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 8).sparse(true));
    const torch::Tensor turned = torch::ones({8}, torch::kComplexFloat).requires_grad_();
    const torch::Tensor late = torch::ones({8}).requires_grad_();
    NamedParameters named = layers->named_parameters();
    named.insert("embedding", embedding->weight);
    named.insert("turned", turned);
    named.insert("late", late);
    broadcast_parameters(named);
    SGD sgd(named.values(), SGDOptions(0.05));
    DistributedOptimizer optimizer(
        sgd, named, {.groups = {{"0.weight", "3.bias"}}, .gradient_as_bucket_view = views});
    std::uint64_t operations = 0;
    for (int step = 0; step < 6; ++step) {
      const std::uint64_t before = metrics().completed_operations;
      optimizer.zero_grad();
      torch::Tensor x = embedding->forward(torch::tensor({(rank() + step) % 10, 9}));
      if (step > 2) x = x * late;
      const torch::Tensor out = layers->forward(x);
      (out.sum() + torch::real(turned * static_cast<double>(rank() + 1)).sum()).backward();
      optimizer.synchronize();
      EXPECT_EQ(turned.grad()[0].item<c10::complex<float>>().real(),
                static_cast<float>(size() + 1) / 2);
      EXPECT_TRUE(embedding->weight.grad().is_sparse());
      EXPECT_EQ(late.grad().defined(), step > 2);
      EXPECT_TRUE(same_on_all_ranks(layers->parameters()[3].grad()));
      optimizer.step();
      operations = metrics().completed_operations - before;
    }
    if (views && no_buckets() == nullptr) {
      EXPECT_LE(operations, 24U) << "of 35 parameters, a sparse one of which is three operations";
    }
    EXPECT_TRUE(same_on_all_ranks(layers->parameters()));
    EXPECT_TRUE(same_on_all_ranks(late));
    EXPECT_TRUE(same_on_all_ranks(torch::view_as_real(turned.detach())));
  }
}

TEST(BucketViews, AStepThatIsDroppedThoughAParameterHadNoGradient) {
  // On one rank the bucket is complete, on another it is not.
  expect_equal_with_views([](Net& net, SGD& sgd, DistributedOptimizer& optimizer, int step) {
    const auto partly = [&] {
      torch::Tensor hidden = torch::tanh(net->fc1->forward(Batch::of_rank(rank(), 30 + step).x));
      if (rank() == 0) hidden = net->norm->forward(hidden);
      net->fc2->forward(hidden).sum().backward();
    };
    optimizer.zero_grad();
    partly();
    if (step % 2 == 0) {
      optimizer.zero_grad();
    } else {
      sgd.zero_grad();
    }
    partly();
    optimizer.step();
  });
}

TEST(BucketViews, GradientsThatAreZeroedOrDropped) {
  for (const bool to_none : {true, false}) {
    expect_equal_with_views([&](Net& net, SGD&, DistributedOptimizer& optimizer, int step) {
      optimizer.zero_grad(to_none);
      backward(net, step);
      optimizer.step();
    });
  }
}

TEST(BucketViews, TheInnerOptimizersAndTheModulesZeroGrad) {
  expect_equal_with_views([](Net& net, SGD& sgd, DistributedOptimizer& optimizer, int step) {
    if (step % 3 == 0) {
      sgd.zero_grad(step % 2 == 0);
    } else {
      net->zero_grad(step % 2 == 0);
    }
    backward(net, step);
    optimizer.step();
  });
}

TEST(BucketViews, Clipping) {
  expect_equal_with_views([](Net& net, SGD&, DistributedOptimizer& optimizer, int step) {
    optimizer.zero_grad();
    backward(net, step);
    optimizer.synchronize();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
    const auto skip = optimizer.skip_synchronize();
    optimizer.step();
  });
}

TEST(BucketViews, SeveralPassesAndNoSync) {
  expect_equal_with_views(
      [](Net& net, SGD&, DistributedOptimizer& optimizer, int step) {
        optimizer.zero_grad(step % 2 == 0);
        {
          const auto guard = optimizer.no_sync();
          backward(net, 100 + step);
        }
        backward(net, step);
        backward(net, 10 + step);
        optimizer.step();
      },
      {.backward_passes_per_step = 2});
}

TEST(BucketViews, AGradientThatTheUserHasPutThere) {
  expect_equal_with_views([](Net& net, SGD&, DistributedOptimizer& optimizer, int step) {
    optimizer.zero_grad();
    // Backward adds to a gradient of another memory format, and of other memory.
    net->fc1->weight.mutable_grad() =
        torch::empty_strided(net->fc1->weight.sizes(), {1, net->fc1->weight.size(0)}).fill_(1);
    backward(net, step);
    optimizer.synchronize();
    net->fc2->bias.mutable_grad() = net->fc2->bias.grad() * 2;
    const auto skip = optimizer.skip_synchronize();
    optimizer.step();
  });
}

TEST(BucketViews, AParameterWithoutAGradient) {
  // By turns, all ranks, rank 0 and no rank use the parameter.
  const Step run = [](Net& net, SGD&, DistributedOptimizer& optimizer, int step) {
    optimizer.zero_grad();
    const Batch batch = Batch::of_rank(rank(), step);
    const bool used = step % 3 == 0 || (step % 3 == 1 && rank() == 0);
    torch::Tensor hidden = torch::tanh(net->fc1->forward(batch.x));
    if (used) hidden = net->norm->forward(hidden);
    torch::mse_loss(net->fc2->forward(hidden), batch.y).backward();
    optimizer.step();
    const bool anywhere = step % 3 != 2;
    EXPECT_EQ(net->norm->weight.grad().defined(), anywhere) << "step " << step;
  };
  expect_equal_with_views(run);
}

TEST(BucketViews, ParametersFrozenLater) {
  expect_equal_with_views([](Net& net, SGD&, DistributedOptimizer& optimizer, int step) {
    if (step == 2) net->fc1->weight.set_requires_grad(false);
    if (step == 4) net->fc1->weight.set_requires_grad(true);
    train_step(net, optimizer, step);
  });
}

// Like a program that freezes one of two models around the other's zero_grad().
TEST(BucketViews, StayWhenParametersAreFrozenAndUnfrozenInOneStep) {
  if (const char* const why = no_buckets()) GTEST_SKIP() << why;
  Net net = same_net();
  SGD inner(net->parameters(), SGDOptions(0.05));
  DistributedOptimizer optimizer(inner, net);
  const void* place = nullptr;
  std::uint64_t operations = 0;
  for (int step = 0; step < 6; ++step) {
    const std::uint64_t before = metrics().completed_operations;
    for (const torch::Tensor& parameter : net->parameters()) parameter.set_requires_grad(false);
    optimizer.zero_grad();
    for (const torch::Tensor& parameter : net->parameters()) parameter.set_requires_grad(true);
    backward(net, step);
    optimizer.step();
    const std::uint64_t now = metrics().completed_operations - before;
    if (step > 1) {
      EXPECT_EQ(net->fc1->weight.grad().const_data_ptr(), place) << "another bucket";
      EXPECT_EQ(now, operations) << "an order was learnt again";
    }
    place = net->fc1->weight.grad().const_data_ptr();
    operations = now;
  }
}

TEST(BucketViews, GradientsDiscardedBeforeTheyAreUsed) {
  expect_equal_with_views([](Net& net, SGD&, DistributedOptimizer& optimizer, int step) {
    optimizer.zero_grad();
    backward(net, 50 + step);
    train_step(net, optimizer, step);
  });
}

TEST(BucketViews, ASharedParameterAndOneOfAnotherType) {
  for (const bool views : {true, false}) {
    torch::manual_seed(3);
    torch::Tensor shared = torch::randn({5, 5}).requires_grad_();
    torch::Tensor wide = torch::randn({5}, torch::kFloat64).requires_grad_();
    torch::Tensor last = torch::randn({4, 6, 2}).permute({2, 0, 1}).requires_grad_();
    NamedParameters named{{"shared", shared}, {"again", shared}, {"wide", wide}, {"last", last}};
    SGD sgd(std::vector<torch::Tensor>{shared, wide, last}, SGDOptions(0.1));
    DistributedOptimizer optimizer(sgd, named, {.gradient_as_bucket_view = views});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const double factor = rank() + step + 1;
      ((shared * factor).sum() + (shared * 2).sum() + (wide * factor).sum() + (last * factor).sum())
          .backward();
      optimizer.synchronize();
      const double mean = step + 1 + (size() - 1) / 2.0;
      EXPECT_TRUE(near(shared.grad(), torch::full({5, 5}, mean + 2))) << step;
      EXPECT_TRUE(near(wide.grad(), torch::full({5}, mean, torch::kFloat64))) << step;
      EXPECT_TRUE(near(last.grad(), torch::full({2, 4, 6}, mean))) << step;
      const auto skip = optimizer.skip_synchronize();
      optimizer.step();
    }
  }
}

// Small and large gradients are copied into their bucket in different ways.
TEST(BucketViews, GradientsOfManySizes) {
  std::vector<torch::Tensor> parameters;
  NamedParameters named;
  for (const std::int64_t count : {1, 3, 1000, 16384, 16385, 100000}) {
    parameters.push_back(torch::zeros({count}).requires_grad_());
    named.insert("of" + std::to_string(count), parameters.back());
  }
  SGD sgd(parameters, SGDOptions(0.1));
  DistributedOptimizer optimizer(sgd, named);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = torch::zeros({});
    for (const torch::Tensor& parameter : parameters) {
      loss = loss + (parameter * torch::arange(1, parameter.numel() + 1, torch::kFloat32) *
                     (rank() + step))
                        .sum();
    }
    loss.backward();
    optimizer.synchronize();
    for (const torch::Tensor& parameter : parameters) {
      const torch::Tensor mean =
          torch::arange(1, parameter.numel() + 1, torch::kFloat32) * (step + (size() - 1) / 2.0);
      EXPECT_TRUE(near(parameter.grad(), mean)) << parameter.numel() << " elements, step " << step;
    }
    const auto skip = optimizer.skip_synchronize();
    optimizer.step();
  }
}

// A program that freezes layers in every other step has two sets of buckets, and learns twice.
TEST(BucketViews, ASetOfFrozenLayersIsLearntOnce) {
  const auto train = [](bool views, bool toggle) {
    Net net = same_net();
    SGD sgd(net->parameters(), SGDOptions(0.05));
    DistributedOptimizer optimizer(sgd, net->named_parameters(),
                                   {.gradient_as_bucket_view = views, .check_every = 0});
    std::uint64_t operations = 0;
    for (int step = 0; step < 9; ++step) {
      for (const torch::Tensor& parameter : net->fc1->parameters())
        parameter.set_requires_grad(!toggle || step % 2 == 0);
      const std::uint64_t before = metrics().completed_operations;
      train_step(net, optimizer, step);
      operations = metrics().completed_operations - before;
    }
    std::vector<torch::Tensor> values;
    for (const torch::Tensor& parameter : net->parameters())
      values.push_back(parameter.detach().clone());
    EXPECT_TRUE(same_on_all_ranks(values));
    return std::pair(values, operations);
  };
  const auto [values, operations] = train(true, true);
  const auto [expected, one_by_one] = train(false, true);
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(near(values[i], expected[i])) << i;
  EXPECT_EQ(operations, train(true, false).second) << "the last step agrees on no order";
}

TEST(BucketViews, GradientsOutliveTheOptimizerAndTheJob) {
  Net net = same_net();
  {
    SGD sgd(net->parameters(), SGDOptions(0.05));
    DistributedOptimizer optimizer(sgd, net->named_parameters());
    for (int step = 0; step < 3; ++step) train_step(net, optimizer, step);
  }
  const torch::Tensor gradient = net->fc1->weight.grad();
  const torch::Tensor copy = gradient.clone();
  shutdown();
  init();
  EXPECT_TRUE(torch::equal(gradient, copy));
  gradient.mul_(2);
  EXPECT_TRUE(torch::equal(gradient, copy * 2));
}

}  // namespace
}  // namespace hvd::testing
