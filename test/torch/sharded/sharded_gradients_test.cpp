#include <cmath>
#include <limits>

#include "torch/sharded/sharded_job.h"

// Uses of gradients between backward() and step().

namespace hvd::testing {
namespace {

constexpr int kFewSteps = 6;

/// Both models and their optimizers.
struct Job {
  Pair nets;
  torch::optim::Adam inner{nets.sharded->parameters(), torch::optim::AdamOptions(0.01)};
  torch::optim::Adam serial{nets.serial->parameters(), torch::optim::AdamOptions(0.01)};
};

TEST(ShardedGradients, TheNormIsThatOfAllOfThem) {
  for (const double type : {2.0, 1.0, 3.0, std::numeric_limits<double>::infinity()}) {
    SCOPED_TRACE(type);
    Job job;
    torch::optim::SGD inner(job.nets.sharded->parameters(), torch::optim::SGDOptions(0.05));
    torch::optim::SGD serial(job.nets.serial->parameters(), torch::optim::SGDOptions(0.05));
    ShardedOptimizer optimizer(inner, job.nets.sharded);
    for (int step = 0; step < kFewSteps; ++step) {
      // A limit that is too high for some steps, and too low for others.
      const double limit = step % 2 == 0 ? 0.05 : 1e6;
      optimizer.zero_grad();
      loss_of(job.nets.sharded, Batch::of_rank(rank(), step)).backward();
      const double norm = optimizer.clip_grad_norm_(limit, type);
      optimizer.step();
      serial.zero_grad();
      loss_of(job.nets.serial, Batch::joined(step)).backward();
      const double expected =
          torch::nn::utils::clip_grad_norm_(job.nets.serial->parameters(), limit, type);
      serial.step();
      EXPECT_NEAR(norm, expected, 1e-4 * expected);
    }
    expect_equal_models(job.nets.sharded, job.nets.serial);
  }
}

TEST(ShardedGradients, ValuesAreClipped) {
  Job job;
  torch::optim::SGD inner(job.nets.sharded->parameters(), torch::optim::SGDOptions(0.5));
  torch::optim::SGD serial(job.nets.serial->parameters(), torch::optim::SGDOptions(0.5));
  ShardedOptimizer optimizer(inner, job.nets.sharded);
  for (int step = 0; step < kFewSteps; ++step) {
    optimizer.zero_grad();
    loss_of(job.nets.sharded, Batch::of_rank(rank(), step)).backward();
    optimizer.clip_grad_value_(0.01);
    optimizer.step();
    serial.zero_grad();
    loss_of(job.nets.serial, Batch::joined(step)).backward();
    torch::nn::utils::clip_grad_value_(job.nets.serial->parameters(), 0.01);
    serial.step();
  }
  expect_equal_models(job.nets.sharded, job.nets.serial);
}

/// Clips gradients after unscaling. Every rank skips one step, in which the last rank has an inf.
TEST(ShardedGradients, AreScaled) {
  Job job;
  ShardedOptimizer optimizer(job.inner, job.nets.sharded);
  GradScaler scaler({.init_scale = 1024, .growth_interval = 100});
  for (int step = 0; step < kFewSteps; ++step) {
    const bool overflow = step == 3;
    const auto before = job.nets.sharded->fc1->weight.detach().clone();
    optimizer.zero_grad();
    torch::Tensor loss = loss_of(job.nets.sharded, Batch::of_rank(rank(), step));
    if (overflow && rank() == size() - 1) loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    if (step % 2 == 0) {
      scaler.unscale_(optimizer);
      optimizer.clip_grad_norm_(0.1);
    }
    EXPECT_EQ(scaler.step(optimizer), !overflow);
    scaler.update();
    EXPECT_EQ(torch::equal(before, job.nets.sharded->fc1->weight), overflow);
    EXPECT_EQ(scaler.get_scale(), step < 3 ? 1024 : 512);
    if (overflow) continue;
    job.serial.zero_grad();
    loss_of(job.nets.serial, Batch::joined(step)).backward();
    if (step % 2 == 0) torch::nn::utils::clip_grad_norm_(job.nets.serial->parameters(), 0.1);
    job.serial.step();
  }
  expect_equal_models(job.nets.sharded, job.nets.serial);
}

/// A skipped step clears the gradients too, so that backward does not add to values that
/// overflowed.
TEST(ShardedGradients, OfASkippedStepAreGone) {
  Job job;
  ShardedOptimizer optimizer(job.inner, job.nets.sharded);
  GradScaler scaler({.init_scale = 1024, .growth_interval = 100});
  for (int step = 0; step < kFewSteps; ++step) {  // without zero_grad()
    const bool overflow = step == 0 || step == 3;
    torch::Tensor loss = loss_of(job.nets.sharded, Batch::of_rank(rank(), step));
    if (overflow && rank() == size() - 1) loss = loss * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    EXPECT_EQ(scaler.step(static_cast<torch::optim::Optimizer&>(optimizer)), !overflow) << step;
    scaler.update();
    for (const torch::Tensor& parameter : job.nets.sharded->parameters())
      EXPECT_FALSE(parameter.grad().defined()) << step;
    if (overflow) continue;
    job.serial.zero_grad();
    loss_of(job.nets.serial, Batch::joined(step)).backward();
    job.serial.step();
  }
  expect_equal_models(job.nets.sharded, job.nets.serial);
}

TEST(ShardedGradients, AddUp) {
  Job job;
  ShardedOptimizer optimizer(job.inner, job.nets.sharded, {.backward_passes_per_step = 2});
  for (int step = 0; step < kFewSteps; ++step) {
    optimizer.zero_grad();
    job.serial.zero_grad();
    // Two passes that count and, in some steps, one that does not.
    for (int pass = 0; pass < (step % 2 == 0 ? 2 : 3); ++pass) {
      std::optional<NoSync> guard;
      if (step % 2 == 1 && pass == 0) guard.emplace(optimizer.no_sync());
      loss_of(job.nets.sharded, Batch::of_rank(rank(), 10 * step + pass)).backward();
      loss_of(job.nets.serial, Batch::joined(10 * step + pass)).backward();
    }
    optimizer.step();
    job.serial.step();
  }
  expect_equal_models(job.nets.sharded, job.nets.serial);
}

// After the reduction this rank has only its own part of each gradient.
TEST(ShardedGradients, TakeNoFurtherPassBetweenSynchronizeAndStep) {
  train_by_each_optimizer([](Pair& nets, torch::optim::Optimizer& inner,
                             torch::optim::Optimizer& serial) {
    ShardedOptimizer optimizer(inner, nets.sharded);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      backward(nets.sharded, 10 + step);
      step % 2 == 0 ? optimizer.synchronize() : static_cast<void>(optimizer.clip_grad_norm_(1e9));
      if (size() > 1) {
        for (int attempt = 0; attempt < 2; ++attempt) {
          const std::string message =
              message_of<UsageError>([&] { backward(nets.sharded, 20 + step); });
          EXPECT_TRUE(contains(message, "zero_grad()")) << message;
          const auto guard = optimizer.no_sync();
          EXPECT_THROW(backward(nets.sharded, 20 + step), UsageError);
        }
      }
      step_both(nets, optimizer, serial, step);  // zero_grad() allows a new pass
      backward(nets.sharded, 30 + step);
      optimizer.synchronize();
      nets.sharded->zero_grad();
      backward(nets.sharded, 40 + step);
    }
    optimizer.zero_grad();
    expect_equal_models(nets.sharded, nets.serial);
  });
}

TEST(ShardedGradients, AreDroppedByZeroGrad) {
  Job job;
  ShardedOptimizer optimizer(job.inner, job.nets.sharded);
  for (int step = 0; step < kFewSteps; ++step) {
    loss_of(job.nets.sharded, Batch::of_rank(rank(), 100 + step)).backward();
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
    loss_of(job.nets.sharded, Batch::of_rank(rank(), step)).backward();
    optimizer.step();
    job.serial.zero_grad();
    loss_of(job.nets.serial, Batch::joined(step)).backward();
    job.serial.step();
  }
  expect_equal_models(job.nets.sharded, job.nets.serial);
}

TEST(ShardedGradients, TravelCompressed) {
  Job job;
  torch::optim::SGD inner(job.nets.sharded->parameters(), torch::optim::SGDOptions(0.05));
  torch::optim::SGD serial(job.nets.serial->parameters(), torch::optim::SGDOptions(0.05));
  ShardedOptimizer optimizer(inner, job.nets.sharded, {.compression = Compression::kBFloat16});
  for (int step = 0; step < kFewSteps; ++step) step_both(job.nets, optimizer, serial, step);
  expect_equal_models(job.nets.sharded, job.nets.serial, 5e-2);
}

/// The gradient of an embedding stays sparse, so one rank has all of the embedding.
TEST(ShardedGradients, MayBeSparse) {
  for (const bool as_dense : {false, true}) {
    SCOPED_TRACE(as_dense);
    torch::manual_seed(4);
    const auto make = [] {
      return torch::nn::Sequential(
          torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true)),
          torch::nn::Linear(4, 2));
    };
    torch::nn::Sequential net = make(), reference = make();
    broadcast_parameters(*net);
    copy_values(*net, *reference);
    torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.5));
    torch::optim::SGD serial(reference->parameters(), torch::optim::SGDOptions(0.5));
    ShardedOptimizer optimizer(inner, *net, {.sparse_as_dense = as_dense});
    const auto words = [](int rank, int step) { return torch::tensor({rank, rank + step, 9}); };
    for (int step = 0; step < kFewSteps; ++step) {
      net->forward(words(rank(), step)).pow(2).mean().backward();
      EXPECT_GT(optimizer.clip_grad_norm_(1.0), 0);
      optimizer.step();
      serial.zero_grad();
      std::vector<torch::Tensor> all;
      for (int r = 0; r < size(); ++r) all.push_back(words(r, step));
      reference->forward(torch::cat(all)).pow(2).mean().backward();
      torch::Tensor& gradient = reference->parameters()[0].mutable_grad();
      gradient = gradient.to_dense();
      torch::nn::utils::clip_grad_norm_(reference->parameters(), 1.0);
      serial.step();
    }
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(near(net->parameters()[i], reference->parameters()[i], 1e-4));
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  }
}

TEST(ShardedParameters, ThatDifferAreNoticed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  torch::manual_seed(rank());  // and no broadcast
  Net net;
  torch::optim::Adam inner(net->parameters(), torch::optim::AdamOptions(0.01));
  ShardedOptimizer optimizer(inner, net);
  backward(net);
  const auto before = net->fc1->weight.detach().clone();
  EXPECT_THROW(optimizer.step(), DivergedError);
  EXPECT_TRUE(torch::equal(before, net->fc1->weight));
}

TEST(ShardedParameters, ThatDifferLaterAreNoticed) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  Net net = same_net();
  torch::optim::Adam inner(net->parameters(), torch::optim::AdamOptions(0.01));
  ShardedOptimizer optimizer(inner, net, {.check_every = 1});
  for (int step = 0; step < 4; ++step) {
    backward(net, step);
    optimizer.step();
  }
  {
    const torch::NoGradGuard no_grad;
    if (rank() == 1) net->fc2->weight.detach().add_(0.5);
  }
  backward(net, 4);
  const std::string message = message_of<DivergedError>([&] { optimizer.step(); });
  EXPECT_TRUE(contains(message, "fc2.weight")) << message;
}

}  // namespace
}  // namespace hvd::testing
