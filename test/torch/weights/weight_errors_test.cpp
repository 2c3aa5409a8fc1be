// Wrong uses of weights, and the messages of a weighted step.
#include <string>

#include "hvd/error.h"
#include "torch/weights/weighted_job.h"

namespace hvd::testing {
namespace {

using torch::optim::SGD;

/// A net that is trained with weights.
struct Training {
  explicit Training(DistributedOptimizerOptions options = {})
      : optimizer(inner, net, std::move(options)) {}

  void pass(bool weighted, int step = 0) {
    if (weighted) optimizer.set_weight(samples_of(rank(), step));
    mean_loss(net, own_batch(step)).backward();
  }
  /// A step that must succeed after an error.
  void recover() {
    optimizer.zero_grad();
    pass(true);
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_TRUE(same_on_all_ranks(net->parameters()));
  }

  Net net = same_net();
  SGD inner{net->parameters(), 0.1};
  DistributedOptimizer optimizer;
};

TEST(WeightErrors, ANegativeWeightIsRefusedAtOnce) {
  Training training;
  const std::string message = message_of<UsageError>([&] { training.optimizer.set_weight(-2); });
  EXPECT_TRUE(contains(message,
                       "weight: expected a number of samples from 0 to 2^40, got -2 on "
                       "rank " +
                           std::to_string(rank())))
      << message;
  EXPECT_THROW(training.optimizer.set_weight((std::int64_t{1} << 40) + 1), UsageError);
  training.recover();
}

TEST(WeightErrors, OnlyAveragesHaveWeights) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAdasum}) {
    Training training({.op = op});
    const std::string message = message_of<UsageError>([&] { training.optimizer.set_weight(2); });
    EXPECT_TRUE(contains(message, "a weighted mean over samples needs op average, got " +
                                      std::string(to_string(op))))
        << message;
    training.pass(false);
    training.optimizer.step();
  }
}

TEST(WeightErrors, RanksWithoutAWeightAreNamedOnEveryRank) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  const int without = size() - 1;
  for (const int step : {0, 1, 6}) {  // the first step, the first with buckets, and a later one
    Training training;
    for (int i = 0; i < step; ++i) {
      training.pass(true, i);
      training.optimizer.step();
      training.optimizer.zero_grad();
    }
    const torch::Tensor before = training.net->fc1->weight.detach().clone();
    training.pass(rank() != without);
    const std::string message = message_of<MismatchError>([&] { training.optimizer.step(); });
    EXPECT_TRUE(contains(message, "rank " + std::to_string(without))) << message;
    EXPECT_TRUE(contains(message, "set no weight for this step")) << message;
    EXPECT_TRUE(contains(message, "expected set_weight()")) << message;
    EXPECT_TRUE(torch::equal(training.net->fc1->weight, before));
    training.recover();
  }
}

TEST(WeightErrors, ADroppedStepMayDiffer) {
  if (size() == 1) GTEST_SKIP() << "needs two ranks";
  Training training;
  for (int step = 0; step < 4; ++step) {
    training.pass(rank() == 0, step);
    training.optimizer.zero_grad();
    training.pass(true, step);
    training.optimizer.step();
    training.optimizer.zero_grad();
  }
  EXPECT_TRUE(same_on_all_ranks(training.net->parameters()));
}

TEST(WeightErrors, AStepWithoutSamplesIsAnErrorOnEveryRank) {
  Training training;
  for (int step = 0; step < 3; ++step) {
    training.recover();
    training.optimizer.set_weight(0);
    mean_loss(training.net, own_batch(0)).backward();
    const std::string message = message_of<UsageError>([&] { training.optimizer.step(); });
    EXPECT_TRUE(contains(message, "the weights of all ranks are 0 in this step")) << message;
  }
  training.recover();
}

TEST(WeightErrors, AWeightAfterBackwardIsRefused) {
  Training training;
  for (int step = 0; step < 2; ++step) {
    training.pass(false);
    training.optimizer.set_weight(3);
    const std::string message = message_of<UsageError>([&] { training.optimizer.step(); });
    EXPECT_TRUE(contains(message, "set_weight() was called after the backward pass")) << message;
    training.recover();
  }
  {
    auto guard = training.optimizer.no_sync();
    training.pass(false);
    EXPECT_THROW(training.pass(true), UsageError) << "the first pass of the step has no weight";
  }
  training.recover();
}

/// The counters of a number of steady steps.
struct Count {
  std::uint64_t operations = 0, negotiated = 0, control = 0, bytes = 0;
  static Count now() {
    const Metrics all = metrics();
    return {all.completed_operations, all.negotiated_operations, all.control_messages_sent,
            all.bytes};
  }
};

constexpr int kCountedSteps = 20;

/// The least of several runs, since the schedule of a run may have been left and entered again.
Count steady_count(bool weighted, const DistributedOptimizerOptions& options) {
  Training training(options);
  Count least;
  for (int run = 0; run < 8; ++run) {
    const Count before = Count::now();
    for (int i = 0; i < kCountedSteps; ++i) {
      training.optimizer.zero_grad();
      training.pass(weighted, i);
      training.optimizer.step();
    }
    const Count after = Count::now();
    const auto take = [&](std::uint64_t Count::*member) {
      const std::uint64_t counted = after.*member - before.*member;
      if (run == 0 || counted < least.*member) least.*member = counted;
    };
    for (const auto member :
         {&Count::operations, &Count::negotiated, &Count::control, &Count::bytes})
      take(member);
  }
  return least;
}

TEST(WeightedSteps, NeedNoMessageMore) {
  for (const Compression compression : {Compression::kNone, Compression::kBFloat16}) {
    const DistributedOptimizerOptions options{.compression = compression, .check_every = 0};
    const Count without = steady_count(false, options);
    const Count with = steady_count(true, options);
    EXPECT_EQ(with.operations, without.operations);
    EXPECT_EQ(with.negotiated, 0U) << "the schedule is replayed";
    EXPECT_EQ(without.negotiated, 0U);
    EXPECT_EQ(with.control, without.control);
    EXPECT_LE(with.bytes, without.bytes + kCountedSteps * 256);
  }
}

}  // namespace
}  // namespace hvd::testing
