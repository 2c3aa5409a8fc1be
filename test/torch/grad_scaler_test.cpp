#include <limits>
#include <sstream>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One parameter of two elements, and its optimizer, distributed over the set.
struct Line {
  torch::Tensor weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD inner{{weight}, 0.5};
  DistributedOptimizer optimizer;

  explicit Line(const ProcessSet& set = {}, ReduceOp op = ReduceOp::kAverage)
      : optimizer(inner, names(weight), {.op = op, .process_set = set}) {}

  static NamedParameters names(const torch::Tensor& weight) {
    NamedParameters named{{"weight", weight}};
    return named;
  }
  /// Backward of sum(weight * x).
  void backward(GradScaler& scaler, float x) {
    optimizer.zero_grad();
    scaler.scale((weight * x).sum()).backward();
  }
  float value() const { return weight[0].item<float>(); }
};

TEST(GradScaler, HasPytorchsDefaults) {
  const GradScalerOptions options;
  EXPECT_EQ(options.init_scale, 65536);
  EXPECT_EQ(options.growth_factor, 2);
  EXPECT_EQ(options.backoff_factor, 0.5);
  EXPECT_EQ(options.growth_interval, 2000);
  EXPECT_TRUE(options.enabled);
  EXPECT_EQ(GradScaler().get_scale(), 65536);
}

TEST(GradScaler, ScalesTheLossAndKeepsItDifferentiable) {
  GradScaler scaler({.init_scale = 8});
  const torch::Tensor x = torch::tensor({2.0F}, torch::requires_grad());
  const torch::Tensor loss = scaler.scale(x);
  EXPECT_EQ(loss.item<float>(), 16);
  loss.sum().backward();
  EXPECT_EQ(x.grad().item<float>(), 8);
  // 65536 itself does not fit into float16.
  GradScaler large;
  const torch::Tensor half = large.scale(torch::tensor(0.5F).to(torch::kFloat16));
  EXPECT_EQ(half.item<float>(), 32768);
  EXPECT_EQ(half.scalar_type(), torch::kFloat32);
  EXPECT_EQ(large.scale(torch::ones({1}, torch::kFloat16)).scalar_type(), torch::kFloat16);
  EXPECT_THROW(large.scale(torch::Tensor()), UsageError);
}

TEST(GradScaler, TrainingEqualsTrainingWithoutIt) {
  for_each_set([](const ProcessSet& set) {
    std::vector<std::vector<torch::Tensor>> results;
    for (const bool scaled : {true, false}) {
      torch::manual_seed(5);
      Net net;
      torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
      DistributedOptimizer optimizer(inner, net->named_parameters(), {.process_set = set});
      GradScaler scaler({.init_scale = 1024, .growth_interval = 3, .enabled = scaled});
      for (int step = 0; step < 8; ++step) {
        optimizer.zero_grad();
        scaler.scale(loss_of(net, Batch::of_rank(rank(), step))).backward();
        if (step % 2 == 0) {
          scaled ? scaler.unscale_(optimizer) : optimizer.synchronize();
          torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1);
        }
        EXPECT_TRUE(scaler.step(optimizer));
        scaler.update();
      }
      EXPECT_EQ(scaler.get_scale(), scaled ? 4096 : 1);
      results.push_back(net->parameters());
    }
    // A power of two changes no bit.
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(torch::equal(results[0][i], results[1][i]));
    }
  });
}

TEST(GradScaler, ReducesOnce) {
  Line line({}, ReduceOp::kSum);
  GradScaler scaler;
  line.backward(scaler, static_cast<float>(rank() + 1));
  scaler.unscale_(line.optimizer);
  const float sum = static_cast<float>(size() * (size() + 1)) / 2;
  EXPECT_EQ(line.weight.grad()[0].item<float>(), sum);
  EXPECT_TRUE(scaler.step(line.optimizer));
  EXPECT_EQ(line.value(), 1 - 0.5F * sum);
}

TEST(GradScaler, RepeatedAfterAVoteThatFailedDividesOnce) {
  if (size() == 1) GTEST_SKIP() << "one rank's vote does not fail";
  // A set of its own, in which the optimizer is called opt0.
  std::vector<int> all_ranks;
  for (int r = 0; r < size(); ++r) all_ranks.push_back(r);
  const ProcessSet set = add_process_set(all_ranks);
  {
    Line line(set);
    GradScaler scaler({.init_scale = 64});
    line.backward(scaler, 3);
    line.optimizer.synchronize();
    const auto vote = [&] { scaler.unscale_(line.optimizer); };
    const auto spoil = [&] {
      allreduce(torch::zeros({2}),
                {.name = "opt0.found_inf", .op = ReduceOp::kMax, .process_set = set});
    };
    rank() == 0 ? message_of<MismatchError>(spoil) : message_of<MismatchError>(vote);
    vote();
    EXPECT_EQ(line.weight.grad()[0].item<float>(), 3);
    EXPECT_TRUE(scaler.step(line.optimizer));
    scaler.update();
    // New gradients are divided again.
    line.backward(scaler, 5);
    rank() == 0 ? message_of<MismatchError>(spoil)
                : message_of<MismatchError>([&] { scaler.step(line.optimizer); });
    line.backward(scaler, 7);
    EXPECT_TRUE(scaler.step(line.optimizer));
    EXPECT_EQ(line.weight.grad()[0].item<float>(), 7);
  }
  remove_process_set(set);
}

TEST(GradScaler, EveryRankSkipsTogether) {
  for_each_set([](const ProcessSet& set) {
    for (const float bad : {kInf, -kInf, kNan}) {
      Line line(set);
      GradScaler scaler({.init_scale = 64, .growth_interval = 2});
      // One rank's gradient is enough, whichever it is.
      for (int step = 0; step < 3; ++step) {
        const bool own = set.rank() == step % set.size();
        line.backward(scaler, own ? bad : 1.0F);
        EXPECT_FALSE(scaler.step(line.optimizer));
        scaler.update();
        EXPECT_EQ(line.value(), 1);
      }
      EXPECT_EQ(scaler.get_scale(), 8);
      line.backward(scaler, 1);
      EXPECT_TRUE(scaler.step(line.optimizer));
      scaler.update();
      EXPECT_EQ(line.value(), 0.5F);
    }
  });
}

TEST(GradScaler, EveryRankSkipsThoughOnlyOneLooksBad) {
  // Spoils the last rank's gradient, as if the reduction had not made it equal on all ranks.
  Line line;
  GradScaler scaler({.init_scale = 4});
  line.backward(scaler, 1);
  line.optimizer.synchronize();
  if (rank() == size() - 1) line.weight.mutable_grad().detach().fill_(kNan);
  EXPECT_FALSE(scaler.step(line.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 2);
  EXPECT_EQ(line.value(), 1);
}

TEST(GradScaler, AStepAfterASkippedOneWaitsForRanksWithoutGradient) {
  Line line;
  GradScaler scaler({.init_scale = 2});
  line.backward(scaler, kNan);
  EXPECT_FALSE(scaler.step(line.optimizer));
  scaler.update();
  line.optimizer.zero_grad();
  // Only rank 0 has a batch.
  if (rank() == 0) scaler.scale((line.weight * 1.0).sum()).backward();
  EXPECT_TRUE(scaler.step(line.optimizer));
  scaler.update();
  EXPECT_FLOAT_EQ(line.value(), 1 - 0.5F / static_cast<float>(size()));
  EXPECT_TRUE(same_on_all_ranks(line.weight));
}

TEST(GradScaler, GrowsAfterAnIntervalWithoutOverflow) {
  Line line;
  GradScaler scaler({.init_scale = 16, .growth_factor = 4, .growth_interval = 3});
  std::vector<double> scales;
  for (const float x : {1.0F, 1.0F, kInf, 1.0F, 1.0F, 1.0F, 1.0F}) {
    line.backward(scaler, x);
    scaler.step(line.optimizer);
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_EQ(scales, (std::vector<double>{16, 16, 8, 8, 8, 32, 32}));

  // The scale stops growing at float32's limit.
  GradScaler largest({.init_scale = 3e38, .growth_interval = 1});
  line.backward(largest, 0);
  largest.step(line.optimizer);
  largest.update();
  EXPECT_EQ(largest.get_scale(), 3e38);
}

TEST(GradScaler, SeveralOptimizersShareOneUpdate) {
  Line first, second;
  GradScaler scaler({.init_scale = 16});
  first.backward(scaler, 1);
  second.backward(scaler, rank() == 0 ? kInf : 1.0F);
  EXPECT_TRUE(scaler.step(first.optimizer));
  EXPECT_FALSE(scaler.step(second.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_EQ(first.value(), 0.5F);
  EXPECT_EQ(second.value(), 1);
}

TEST(GradScaler, SparseGradients) {
  const auto options = torch::nn::EmbeddingOptions(4, 2).sparse(true);
  torch::nn::Embedding net(options);
  broadcast_parameters(net);
  const torch::Tensor before = net->weight.detach().clone();
  torch::optim::SGD inner(net->parameters(), 0.5);
  DistributedOptimizer optimizer(inner, net->named_parameters());
  GradScaler scaler({.init_scale = 32});
  for (const float x : {kInf, 1.0F}) {
    optimizer.zero_grad();
    const float own = rank() == 0 ? x : 1.0F;
    scaler.scale((net->forward(torch::tensor({1, 1})) * own).sum()).backward();
    EXPECT_EQ(scaler.step(optimizer), x == 1);
    scaler.update();
  }
  torch::Tensor expected = before.clone();
  expected[1] -= 1;
  EXPECT_TRUE(near(net->weight, expected));
}

TEST(GradScaler, Disabled) {
  Line line;
  GradScaler scaler({.enabled = false});
  EXPECT_EQ(scaler.get_scale(), 1);
  line.backward(scaler, 1);
  EXPECT_EQ(line.weight.grad().defined(), true);
  scaler.unscale_(line.optimizer);
  EXPECT_TRUE(scaler.step(line.optimizer));
  scaler.update();
  EXPECT_EQ(line.value(), 0.5F);
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(GradScaler, MisuseIsAUsageError) {
  Line line;
  GradScaler scaler;
  EXPECT_THROW(scaler.update(), UsageError);
  line.backward(scaler, 1);
  scaler.unscale_(line.optimizer);
  EXPECT_THROW(scaler.unscale_(line.optimizer), UsageError);
  EXPECT_TRUE(scaler.step(line.optimizer));
  EXPECT_THROW(scaler.unscale_(line.optimizer), UsageError);
  EXPECT_THROW(scaler.step(line.optimizer), UsageError);
  scaler.update();
  EXPECT_THROW(scaler.update(), UsageError);
  EXPECT_EQ(line.value(), 0.5F);

  EXPECT_THROW(GradScaler({.init_scale = 0}), UsageError);
  EXPECT_THROW(GradScaler({.growth_factor = 1}), UsageError);
  EXPECT_THROW(GradScaler({.backoff_factor = 1}), UsageError);
  EXPECT_THROW(GradScaler({.growth_interval = 0}), UsageError);
}

TEST(GradScaler, OneForOptimizersOfDifferentProcessSetsIsAUsageError) {
  GradScaler scaler;
  Line line;
  line.backward(scaler, 1);
  scaler.step(line.optimizer);
  scaler.update();
  for_each_set([&](const ProcessSet& set) {
    Line other(set);
    other.backward(scaler, 1);
    if (set.id() != 0) {
      EXPECT_THROW(scaler.step(other.optimizer), UsageError);
    } else {
      EXPECT_TRUE(scaler.step(other.optimizer));
    }
    other.optimizer.zero_grad();
  });
}

std::string saved(const GradScaler& scaler) {
  torch::serialize::OutputArchive archive;
  scaler.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

TEST(GradScaler, SavesItsScaleAndProgress) {
  Line line;
  GradScaler scaler({.init_scale = 16, .growth_factor = 8, .growth_interval = 2});
  line.backward(scaler, 1);
  scaler.step(line.optimizer);
  scaler.update();

  torch::serialize::InputArchive archive;
  const std::string bytes = saved(scaler);
  archive.load_from(bytes.data(), bytes.size());
  GradScaler resumed;
  resumed.load(archive);
  EXPECT_EQ(resumed.get_scale(), 16);
  line.backward(resumed, 1);
  EXPECT_TRUE(resumed.step(line.optimizer));
  resumed.update();
  EXPECT_EQ(resumed.get_scale(), 128);
}

}  // namespace
}  // namespace hvd::testing
