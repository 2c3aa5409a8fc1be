#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "torch/accelerator/accelerator_program.h"
#include "torch/weights/weighted_job.h"

// Batches of different sizes, with the weight of Accelerator::backward().

namespace hvd::testing {
namespace {

/// Counts warnings that contain a text.
struct CountedWarnings final : c10::WarningHandler {
  explicit CountedWarnings(std::string text) : wanted(std::move(text)) {}
  void process(const c10::Warning& warning) override {
    count += contains(warning.msg(), wanted) ? 1 : 0;
  }
  const std::string wanted;
  int count = 0;
};

struct WeightedMode {
  const char* name;
  AcceleratorOptions options = {};
  double max_norm = 0;
  double tolerance = 1e-5;
};

void PrintTo(const WeightedMode& mode, std::ostream* stream) { *stream << mode.name; }

class WeightedAcceleration : public ::testing::TestWithParam<WeightedMode> {};

TEST_P(WeightedAcceleration, EqualsOneProcessOnAllSamples) {
  const WeightedMode& mode = GetParam();
  const int steps = mode.options.gradient_accumulation_steps;
  Accelerator accelerator(mode.options);
  Net net = same_net(), alone = same_net();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::SGD reference(alone->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  std::vector<int> passes;
  for (int pass = 0; pass < 6 * steps; ++pass) {
    auto guard = accelerator.accumulate();
    accelerator.backward(mean_loss(model, own_batch(pass)), {.weight = samples_of(rank(), pass)});
    if (mode.max_norm > 0) accelerator.clip_grad_norm_(mode.max_norm);
    optimizer.step();
    optimizer.zero_grad();
    passes.push_back(pass);
    if (!accelerator.sync_gradients()) continue;
    EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
    mean_loss(alone, joined_batch(passes)).backward();
    if (mode.max_norm > 0) torch::nn::utils::clip_grad_norm_(alone->parameters(), mode.max_norm);
    reference.step();
    reference.zero_grad();
    passes.clear();
  }
  EXPECT_TRUE(near_parameters(net, alone, mode.tolerance));
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

INSTANTIATE_TEST_SUITE_P(
    Modes, WeightedAcceleration,
    ::testing::Values(WeightedMode{.name = "plain"},
                      WeightedMode{.name = "clipped", .max_norm = 0.05},
                      WeightedMode{.name = "accumulated",
                                   .options = {.gradient_accumulation_steps = 3},
                                   .max_norm = 0.05},
                      WeightedMode{.name = "sharded",
                                   .options = {.gradient_accumulation_steps = 2, .sharded = true},
                                   .max_norm = 0.05},
                      WeightedMode{.name = "compressed",
                                   .options = {.compression = Compression::kBFloat16},
                                   .tolerance = 2e-2},
                      WeightedMode{.name = "scaled",
                                   .options = {.mixed_precision = Precision::kFP16,
                                               .gradient_accumulation_steps = 2,
                                               .grad_scaler = {.init_scale = 256}},
                                   .max_norm = 0.05,
                                   .tolerance = 1e-2}),
    [](const auto& mode) { return std::string(mode.param.name); });

TEST(AcceleratedWeights, CountForTheOptimizersThatAPassReaches) {
  // As in a GAN: the second model's pass goes through the first model.
  Accelerator accelerator;
  Net first = same_net(), alone_first = same_net();
  torch::nn::Linear second(4, 4), alone_second(4, 4);
  broadcast_parameters(second);
  copy_values(*second, *alone_second);
  torch::optim::SGD of_first(first->parameters(), 0.1), of_second(second->parameters(), 0.1);
  torch::optim::SGD ref_first(alone_first->parameters(), 0.1);
  torch::optim::SGD ref_second(alone_second->parameters(), 0.1);
  auto [a, b, optimizer_a, optimizer_b] = accelerator.prepare(first, second, of_first, of_second);
  const auto through = [](Net& outer, torch::nn::Linear& inner, const Batch& batch) {
    return torch::mse_loss(outer->forward(inner->forward(batch.x)), batch.y);
  };
  for (int step = 0; step < 5; ++step) {
    optimizer_a.zero_grad();
    accelerator.backward(mean_loss(a, own_batch(2 * step)),
                         {.weight = samples_of(rank(), 2 * step)});
    optimizer_a.step();
    optimizer_b.zero_grad();
    accelerator.backward(through(a, b, own_batch(2 * step + 1)),
                         {.weight = samples_of(rank(), 2 * step + 1)});
    optimizer_b.step();
    ref_first.zero_grad();
    mean_loss(alone_first, joined_batch({2 * step})).backward();
    ref_first.step();
    ref_second.zero_grad();
    through(alone_first, alone_second, joined_batch({2 * step + 1})).backward();
    ref_second.step();
  }
  EXPECT_TRUE(near_parameters(first, alone_first));
  EXPECT_TRUE(near(second->weight, alone_second->weight, 1e-5));
}

TEST(AcceleratedWeights, TwoPassesBeforeTheStepsCountOncePerOptimizer) {
  Accelerator accelerator;
  Net first = same_net(), second = same_net(), alone = same_net();
  torch::optim::SGD of_first(first->parameters(), 0.1), of_second(second->parameters(), 0.1);
  torch::optim::SGD reference(alone->parameters(), 0.1);
  auto [a, b, optimizer_a, optimizer_b] = accelerator.prepare(first, second, of_first, of_second);
  for (int step = 0; step < 4; ++step) {
    for (Net* const net : {&a, &b})
      accelerator.backward(mean_loss(*net, own_batch(step)), {.weight = samples_of(rank(), step)});
    for (AcceleratedOptimizer* const optimizer : {&optimizer_a, &optimizer_b}) {
      optimizer->step();
      optimizer->zero_grad();
    }
    mean_loss(alone, joined_batch({step})).backward();
    reference.step();
    reference.zero_grad();
  }
  EXPECT_TRUE(near_parameters(first, alone));
  EXPECT_TRUE(near_parameters(second, alone));
}

TEST(AcceleratedWeights, UnevenRanksTrainOnEachSampleOnce) {
  // 7 N - 1 samples: the batches of an epoch have sizes that differ between ranks.
  const std::size_t samples = static_cast<std::size_t>(7 * size() - 1);
  Accelerator accelerator({.gradient_accumulation_steps = 2});
  CountedWarnings warnings("loader 'uneven' gives the ranks batches of different sizes");
  auto data = points(samples);
  auto train = hvd::loader(
      points(samples),
      {.batch_size = 3, .shuffle = false, .remainder = Remainder::kUneven, .name = "uneven"});
  Net net = same_net(), alone = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1), reference(alone->parameters(), 0.1);
  const auto prepared = [&] {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    return accelerator.prepare(net, sgd, train);
  }();
  EXPECT_EQ(warnings.count, size() > 1 && rank() == 0 ? 1 : 0);
  auto& optimizer = std::get<1>(prepared);
  std::size_t used = 0, next = 0;
  for (auto& batch : std::get<2>(prepared)) {
    auto step = accelerator.accumulate();
    accelerator.backward(torch::mse_loss(net->forward(batch.data), batch.target),
                         {.weight = batch.data.size(0)});
    optimizer.step();
    optimizer.zero_grad();
    next = std::min(next + 3 * static_cast<std::size_t>(size()), samples);
    if (!accelerator.sync_gradients()) continue;
    // The samples of all ranks since the last step, which are contiguous.
    std::vector<std::size_t> indices(next - used);
    std::iota(indices.begin(), indices.end(), used);
    const auto all = data.get_batch(indices);
    torch::mse_loss(alone->forward(all.data), all.target).backward();
    reference.step();
    reference.zero_grad();
    used = next;
  }
  hvd::join(accelerator.training_state());
  broadcast_parameters(alone);  // rank 0 has made every step
  EXPECT_TRUE(near_parameters(net, alone));
}

TEST(AcceleratedWeights, WrongOnesAreRefused) {
  Accelerator accelerator({.gradient_accumulation_steps = 2});
  const torch::Tensor loss = torch::ones({}, torch::requires_grad());
  EXPECT_TRUE(contains(message_of<UsageError>([&] { accelerator.backward(loss, {.weight = 1}); }),
                       "Accelerator::backward: weight: no optimizer is prepared"));
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  const auto pass = [&, &model = model](BackwardOptions options) {
    accelerator.backward(mean_loss(model, own_batch(0)), options);
  };
  EXPECT_TRUE(contains(message_of<UsageError>([&] { pass({.weight = -1}); }),
                       "expected a number of samples from 0 to 2^40, got -1"));
  {
    auto step = accelerator.accumulate();
    pass({.weight = 2});
    EXPECT_TRUE(contains(message_of<UsageError>([&] { pass({}); }),
                         "a backward pass without a weight follows one with a weight"));
  }
  {
    auto step = accelerator.accumulate();
    optimizer.zero_grad();
    optimizer.wrapper().set_weight(3);
    EXPECT_TRUE(contains(message_of<UsageError>([&] { pass({}); }),
                         "set_weight() was called before Accelerator::backward()"));
    pass({.weight = 2});
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_TRUE(same_on_all_ranks(net->parameters()));
}

// The first optimizer's pass has begun when the second one refuses its pass.
TEST(AcceleratedWeights, ARefusedPassLeavesNoOptimizerInAPass) {
  Accelerator accelerator;
  Net net = same_net(), other = same_net(), alone = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.1), other_sgd(other->parameters(), 0.1);
  torch::optim::SGD reference(alone->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  auto [other_model, other_optimizer] = accelerator.prepare(other, other_sgd);
  {
    auto accumulating = accelerator.no_sync();
    optimizer.wrapper().set_weight(samples_of(rank(), 0));
    (mean_loss(model, own_batch(0)) / 2).backward();
  }
  other_optimizer.wrapper().set_weight(3);
  EXPECT_TRUE(contains(message_of<UsageError>([&, &model = model] {
                         accelerator.backward(mean_loss(model, own_batch(0)));
                       }),
                       "set_weight() was called before Accelerator::backward()"));
  // The rest of the batch belongs to the weight that was set, since no pass is under way.
  (mean_loss(model, own_batch(0)) / 2).backward();
  optimizer.step();
  mean_loss(alone, joined_batch({0})).backward();
  reference.step();
  EXPECT_TRUE(near_parameters(net, alone, 1e-5));
}

}  // namespace
}  // namespace hvd::testing
