#include <cmath>
#include <limits>
#include <numeric>

#include "torch/accelerator/accelerator_program.h"

// Training by an Accelerator equals training in one process on the joined batches.

namespace hvd::testing {
namespace {

constexpr std::size_t kSamples = 60;  // 20, 10 and 5 full batches on 1, 2 and 4 ranks
constexpr std::int64_t kBatch = 3;
constexpr std::size_t kEpochs = 2;

struct Mode {
  const char* name;
  AcceleratorOptions options;
  double max_norm = 0;      ///< 0: no clipping
  double tolerance = 1e-5;  ///< of parameters, relative and absolute
};

void PrintTo(const Mode& mode, std::ostream* stream) { *stream << mode.name; }

Autocast autocast_of(Precision precision) {
  return Autocast(torch::kCPU, precision == Precision::kFP16 ? torch::kFloat16 : torch::kBFloat16,
                  precision != Precision::kNo);
}

torch::Tensor loss_in(Net& net, const torch::Tensor& x, const torch::Tensor& y) {
  return torch::mse_loss(net->forward(x).to(torch::kFloat32), y);
}

/// The parameters after the training, and the learning rate.
struct Trained {
  std::vector<torch::Tensor> parameters;
  double rate = 0;
};

/// Trains with LibTorch alone, on the batches of all ranks together.
Trained train_joined(const Mode& mode) {
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::StepLR schedule(sgd, 2, 0.9);
  const auto joined = static_cast<std::size_t>(kBatch * size());
  libtorch::LoaderProgress progress(
      kSamples, {.batch_size = static_cast<std::int64_t>(joined), .seed = 5}, 0, 1);
  auto data = points(kSamples);
  const int steps = mode.options.gradient_accumulation_steps;
  int pass = 0;
  for (std::size_t epoch = 0; epoch < kEpochs; ++epoch) {
    progress.set_epoch(epoch);
    const std::vector<std::size_t> samples = progress.samples();
    for (std::size_t i = 0; i < samples.size(); i += joined) {
      const auto batch = data.get_batch(c10::ArrayRef<std::size_t>(samples).slice(i, joined));
      torch::Tensor loss;
      {
        const Autocast autocast = autocast_of(mode.options.mixed_precision);
        loss = loss_in(net, batch.data, batch.target);
      }
      (loss / steps).backward();
      const bool last = i + joined >= samples.size();
      if (++pass < steps && !last) continue;
      pass = 0;
      if (mode.max_norm > 0) torch::nn::utils::clip_grad_norm_(net->parameters(), mode.max_norm);
      sgd.step();
      schedule.step();
      sgd.zero_grad();
    }
  }
  return {net->parameters(), sgd.param_groups()[0].options().get_lr()};
}

Trained train_accelerated(const Mode& mode) {
  Accelerator accelerator(mode.options);
  auto train = hvd::loader(points(kSamples), {.batch_size = kBatch, .seed = 5});
  Net net = same_net();
  if (!accelerator.is_main_process()) torch::nn::init::zeros_(net->fc1->weight);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::StepLR schedule(sgd, 2, 0.9);
  auto [model, optimizer, train_loader, scheduler] = accelerator.prepare(net, sgd, train, schedule);
  for (std::size_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (auto& batch : *train_loader) {
      auto step = accelerator.accumulate(model);
      torch::Tensor loss;
      {
        auto autocast = accelerator.autocast();
        loss = loss_in(model, batch.data, batch.target);
      }
      accelerator.backward(loss);
      if (mode.max_norm > 0) accelerator.clip_grad_norm_(mode.max_norm);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
    }
    EXPECT_EQ(train_loader->epoch(), epoch + 1);
  }
  return {net->parameters(), sgd.param_groups()[0].options().get_lr()};
}

class AcceleratedTraining : public ::testing::TestWithParam<Mode> {};

TEST_P(AcceleratedTraining, EqualsOneProcessOnTheJoinedBatches) {
  const Trained expected = train_joined(GetParam());
  const Trained actual = train_accelerated(GetParam());
  EXPECT_EQ(actual.rate, expected.rate);
  EXPECT_TRUE(same_on_all_ranks(actual.parameters));
  for (std::size_t i = 0; i < expected.parameters.size(); ++i)
    EXPECT_TRUE(near(actual.parameters[i], expected.parameters[i], GetParam().tolerance)) << i;
}

INSTANTIATE_TEST_SUITE_P(
    Modes, AcceleratedTraining,
    ::testing::Values(
        Mode{.name = "plain", .options = {}},
        Mode{.name = "clipped", .options = {}, .max_norm = 0.05},
        Mode{.name = "accumulated", .options = {.gradient_accumulation_steps = 2}},
        Mode{.name = "accumulated_clipped",
             .options = {.gradient_accumulation_steps = 3},
             .max_norm = 0.05},
        Mode{.name = "sharded", .options = {.sharded = true}, .max_norm = 0.05},
        Mode{.name = "sharded_accumulated",
             .options = {.gradient_accumulation_steps = 2, .sharded = true}},
        Mode{.name = "bf16", .options = {.mixed_precision = Precision::kBF16}, .tolerance = 2e-2},
        Mode{.name = "fp16",
             .options = {.mixed_precision = Precision::kFP16,
                         .gradient_accumulation_steps = 2,
                         .grad_scaler = {.init_scale = 256}},
             .max_norm = 0.05,
             .tolerance = 1e-2},
        Mode{.name = "fp16_sharded",
             .options = {.mixed_precision = Precision::kFP16,
                         .sharded = true,
                         .grad_scaler = {.init_scale = 256}},
             .max_norm = 0.05,
             .tolerance = 1e-2}),
    [](const auto& mode) { return std::string(mode.param.name); });

TEST(AcceleratedSteps, ASkippedStepOfOneRankIsSkippedOnAllAndHoldsTheScheduler) {
  for (const bool sharded : {false, true}) {
    Accelerator accelerator({.mixed_precision = Precision::kFP16,
                             .sharded = sharded,
                             .grad_scaler = {.init_scale = 64}});
    Net net = same_net();
    torch::optim::SGD sgd(net->parameters(), 0.1);
    Halving schedule(sgd);
    auto [model, optimizer, scheduler] = accelerator.prepare(net, sgd, schedule);
    const auto pass = [&, &model = model, &optimizer = optimizer,
                       &scheduler = scheduler](double factor) {
      const Batch batch = Batch::of_rank(rank(), 0);
      accelerator.backward(loss_of(model, batch) * factor);
      accelerator.clip_grad_norm_(1.0);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    };
    const auto rate = [&] { return sgd.param_groups()[0].options().get_lr(); };
    const torch::Tensor before = net->fc1->weight.detach().clone();
    pass(rank() == size() - 1 ? std::numeric_limits<double>::infinity() : 1.0);
    EXPECT_TRUE(accelerator.optimizer_step_was_skipped());
    EXPECT_TRUE(optimizer.step_was_skipped());
    EXPECT_TRUE(torch::equal(net->fc1->weight, before));
    EXPECT_EQ(rate(), 0.1);
    EXPECT_EQ(accelerator.loss_scale(), 32);
    pass(1.0);
    EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
    EXPECT_FALSE(torch::equal(net->fc1->weight, before));
    EXPECT_EQ(rate(), 0.05);
    EXPECT_EQ(accelerator.loss_scale(), 32);
  }
}

TEST(AcceleratedSteps, TwoOptimizersShareTheLossScaleAndAreUnscaledOnce) {
  Accelerator accelerator(
      {.mixed_precision = Precision::kFP16, .grad_scaler = {.init_scale = 1024}});
  Net first = same_net(), second = same_net();
  torch::optim::SGD of_first(first->parameters(), 0.1), of_second(second->parameters(), 0.1);
  Halving slow(of_first), fast(of_second);
  auto [a, b, optimizer_a, optimizer_b, scheduler_a, scheduler_b] =
      accelerator.prepare(first, second, of_first, of_second, slow, fast);
  Net alone = same_net();
  torch::optim::SGD sgd(alone->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    const Batch batch = Batch::of_rank(rank(), step);
    accelerator.backward(loss_of(a, batch));
    accelerator.backward(loss_of(b, batch));
    EXPECT_GT(accelerator.clip_grad_norm_(1e6), 0);  // unscales both
    for (AcceleratedOptimizer* const optimizer : {&optimizer_a, &optimizer_b}) {
      optimizer->step();
      optimizer->zero_grad();
    }
    loss_of(alone, Batch::joined(step)).backward();
    sgd.step();
    sgd.zero_grad();
  }
  scheduler_a.step();
  EXPECT_EQ(of_first.param_groups()[0].options().get_lr(), 0.05);
  EXPECT_EQ(of_second.param_groups()[0].options().get_lr(), 0.1);
  for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
    EXPECT_TRUE(near(first->parameters()[i], alone->parameters()[i], 1e-5));
    EXPECT_TRUE(near(second->parameters()[i], alone->parameters()[i], 1e-5));
  }
}

TEST(AcceleratedSteps, CallsHaveNoEffectWhereNoStepIsDue) {
  Accelerator accelerator({.gradient_accumulation_steps = 2});
  EXPECT_TRUE(accelerator.sync_gradients());
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  Halving schedule(sgd);
  auto [model, optimizer, scheduler] = accelerator.prepare(net, sgd, schedule);
  const torch::Tensor before = net->fc1->weight.detach().clone();
  {
    auto step = accelerator.accumulate();
    EXPECT_FALSE(accelerator.sync_gradients());
    accelerator.backward(loss_of(model, Batch::of_rank(rank(), 0)));
    EXPECT_EQ(accelerator.clip_grad_norm_(1e-9), 0);
    EXPECT_EQ(accelerator.clip_grad_norm_(model->parameters(), 1e-9), 0);
    accelerator.clip_grad_value_(1e-9);
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
  }
  EXPECT_TRUE(torch::equal(net->fc1->weight, before));
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.1);
  EXPECT_GT(net->fc1->weight.grad().abs().max().item<float>(), 1e-6);
  auto step = accelerator.accumulate();
  EXPECT_TRUE(accelerator.sync_gradients());
  accelerator.backward(loss_of(model, Batch::of_rank(rank(), 1)));
  const double norm = accelerator.clip_grad_norm_(model->parameters(), 1e9);
  EXPECT_NEAR(norm, accelerator.clip_grad_norm_(1e9), 1e-6);
  EXPECT_TRUE(same_on_all_ranks(torch::tensor(norm)));
  optimizer.step();
  scheduler.step();
  optimizer.zero_grad();
  EXPECT_FALSE(torch::equal(net->fc1->weight, before));
  EXPECT_EQ(sgd.param_groups()[0].options().get_lr(), 0.05);
}

TEST(AcceleratedSteps, NoSyncAccumulatesAndAPlateauFollowsTheMetric) {
  Accelerator accelerator;
  Net net = same_net(), alone = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  torch::optim::ReduceLROnPlateauScheduler plateau(
      sgd, torch::optim::ReduceLROnPlateauScheduler::min, 0.5, 0);
  auto [model, optimizer, scheduler] = accelerator.prepare(net, sgd, plateau);
  {
    auto guard = accelerator.no_sync();
    accelerator.backward(loss_of(model, Batch::of_rank(rank(), 0)));
  }
  accelerator.backward(loss_of(model, Batch::of_rank(rank(), 1)));
  optimizer.step();
  loss_of(alone, Batch::joined(0)).backward();
  loss_of(alone, Batch::joined(1)).backward();
  reference.step();
  EXPECT_TRUE(near(net->fc1->weight, alone->fc1->weight, 1e-5));
  scheduler.step(1.0);
  scheduler.step(2.0);
  EXPECT_NEAR(sgd.param_groups()[0].options().get_lr(), 0.05, 1e-9);
  EXPECT_NE(message_of<UsageError>([&scheduler = scheduler] {
              scheduler.step();
            }).find("needs the metric"),
            std::string::npos);
}

TEST(AcceleratedSteps, UnevenRanksStepTogetherAndOneMayHaveABatchMore) {
  Accelerator accelerator({.gradient_accumulation_steps = 2});
  const auto ranks = static_cast<std::size_t>(size());
  // Two batches on every rank, and a third one on rank 0.
  auto train =
      hvd::loader(points(2 * 3 * ranks + 1), {.batch_size = 3, .remainder = Remainder::kUneven});
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer, train_loader] = accelerator.prepare(net, sgd, train);
  int steps = 0;
  for (auto& batch : train_loader) {
    auto step = accelerator.accumulate();
    accelerator.backward(loss_in(model, batch.data, batch.target));
    optimizer.step();
    optimizer.zero_grad();
    steps += accelerator.sync_gradients() ? 1 : 0;
  }
  EXPECT_EQ(steps, rank() == 0 ? 2 : 1);
  hvd::join(accelerator.training_state());
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

TEST(AcceleratedSteps, SyncBatchNormIsConverted) {
  Accelerator accelerator({.sync_batch_norm = true});
  torch::nn::Sequential net(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  EXPECT_NE(model[1]->as<SyncBatchNorm1dImpl>(), nullptr);
  accelerator.backward(model->forward(Batch::of_rank(rank(), 0).x).sum());
  optimizer.step();
  EXPECT_TRUE(same_on_all_ranks(model->buffers()));
}

}  // namespace
}  // namespace hvd::testing
