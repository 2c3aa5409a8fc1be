#include "trainer/learning_rate_schedule.h"

#include <gtest/gtest.h>
#include <hvd/torch.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using libtorch::learning_rate_factor;
using libtorch::make_learning_rate_schedule;
using libtorch::warmup_steps_of;

torch::optim::SGD two_groups(Net& net) {
  torch::optim::OptimizerParamGroup second(net->fc2->parameters(),
                                           std::make_unique<torch::optim::SGDOptions>(0.02));
  return torch::optim::SGD(
      {torch::optim::OptimizerParamGroup(net->fc1->parameters()), std::move(second)},
      torch::optim::SGDOptions(0.1));
}

double rate_of(torch::optim::Optimizer& optimizer, std::size_t group = 0) {
  return optimizer.param_groups().at(group).options().get_lr();
}

/// The rates of `steps` optimizer steps.
std::vector<double> rates(torch::optim::Optimizer& optimizer, torch::optim::LRScheduler& schedule,
                          int steps) {
  std::vector<double> all;
  for (int step = 0; step < steps; ++step) {
    all.push_back(rate_of(optimizer));
    optimizer.step();
    schedule.step();
  }
  return all;
}

/// get_scheduler(name, SGD(lr=0.1), num_warmup_steps=4, num_training_steps=10) of transformers
/// 5.24.0 with PyTorch 2.13.0: the rates of 12 steps.
TEST(LearningRateSchedule, EqualsThatOfTransformers) {
  const std::vector<std::pair<hvd::SchedulerType, std::vector<double>>> expected = {
      {hvd::SchedulerType::kLinear,
       {0.0, 0.025, 0.05, 0.07500000000000001, 0.1, 0.08333333333333334, 0.06666666666666667, 0.05,
        0.03333333333333333, 0.016666666666666666, 0.0, 0.0}},
      {hvd::SchedulerType::kCosine,
       {0.0, 0.025, 0.05, 0.07500000000000001, 0.1, 0.09330127018922195, 0.07500000000000001, 0.05,
        0.025000000000000012, 0.006698729810778065, 0.0, 0.00669872981077807}},
      {hvd::SchedulerType::kConstant,
       {0.0, 0.025, 0.05, 0.07500000000000001, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1}}};
  for (const auto& [type, values] : expected) {
    Net net;
    torch::optim::SGD sgd = two_groups(net);
    const auto schedule = make_learning_rate_schedule(type, 4, 10, sgd);
    const std::vector<double> actual = rates(sgd, *schedule, 12);
    for (std::size_t step = 0; step < values.size(); ++step)
      EXPECT_NEAR(actual[step], values[step], 1e-16) << static_cast<int>(type) << " " << step;
  }
}

TEST(LearningRateSchedule, BeginsWithTheFullRateWithoutAWarmUp) {
  EXPECT_EQ(learning_rate_factor(hvd::SchedulerType::kLinear, 0, 0, 4), 1);
  EXPECT_EQ(learning_rate_factor(hvd::SchedulerType::kLinear, 3, 0, 4), 0.25);
  EXPECT_EQ(learning_rate_factor(hvd::SchedulerType::kCosine, 2, 0, 4), 0.5);
  EXPECT_EQ(learning_rate_factor(hvd::SchedulerType::kConstant, 100, 0, 4), 1);
}

TEST(LearningRateSchedule, WarmsUpToTheEndIfTheTrainingIsShorter) {
  EXPECT_EQ(learning_rate_factor(hvd::SchedulerType::kLinear, 3, 8, 4), 0.375);
  EXPECT_EQ(learning_rate_factor(hvd::SchedulerType::kLinear, 8, 8, 8), 0);
}

TEST(LearningRateSchedule, ScalesTheRateOfEachGroup) {
  Net net;
  torch::optim::SGD sgd = two_groups(net);
  const auto schedule = make_learning_rate_schedule(hvd::SchedulerType::kLinear, 0, 4, sgd);
  EXPECT_EQ(rate_of(sgd, 1), 0.02);
  schedule->step();
  EXPECT_DOUBLE_EQ(rate_of(sgd, 0), 0.075);
  EXPECT_DOUBLE_EQ(rate_of(sgd, 1), 0.015);
}

TEST(LearningRateSchedule, ReachesTheOptimizerThroughItsWrapper) {
  Net net = same_net();
  torch::optim::SGD sgd(net->parameters(), 0.5);
  DistributedOptimizer optimizer(sgd, net);
  const auto schedule = make_learning_rate_schedule(hvd::SchedulerType::kLinear, 2, 4, optimizer);
  const auto before = net->fc1->weight.detach().clone();
  train_step(net, optimizer, 0);
  EXPECT_TRUE(torch::equal(net->fc1->weight, before)) << "the rate of the first step is 0";
  schedule->step();
  train_step(net, optimizer, 1);
  EXPECT_EQ(rate_of(sgd), 0.25);
  EXPECT_FALSE(torch::equal(net->fc1->weight, before));
}

TEST(LearningRateSchedule, ContinuesAfterTheStepThatWasSaved) {
  const std::string folder = broadcast_object(
      (std::filesystem::temp_directory_path() / ("schedule" + std::to_string(::getpid())))
          .string());
  const auto run = [&](int from, int to) {
    Net net = same_net();
    torch::optim::SGD sgd(net->parameters(), 0.1);
    const auto schedule = make_learning_rate_schedule(hvd::SchedulerType::kCosine, 3, 12, sgd);
    TrainingState state;
    state.optimizer(sgd).scheduler(*schedule);
    if (from > 0) load_checkpoint(folder, state);
    const std::vector<double> result = rates(sgd, *schedule, to - from);
    if (to < 12) save_checkpoint(folder, state);
    return result;
  };
  const std::vector<double> whole = run(0, 12);
  std::vector<double> parts = run(0, 7);
  for (const double rate : run(7, 12)) parts.push_back(rate);
  EXPECT_EQ(parts, whole);
  barrier();
  if (rank() == 0) std::filesystem::remove_all(folder);
}

TEST(LearningRateSchedule, RoundsTheWarmUpRatioUp) {
  EXPECT_EQ(warmup_steps_of({}, 10), 0);
  EXPECT_EQ(warmup_steps_of({.warmup_steps = 7}, 10), 7);
  EXPECT_EQ(warmup_steps_of({.warmup_ratio = 0.25}, 10), 3);
}

TEST(LearningRateSchedule, RefusesNumbersOutOfRange) {
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         make_learning_rate_schedule(hvd::SchedulerType::kLinear, -1, 4, sgd);
                       }),
                       "warm-up steps that is at least 0, got -1"));
  EXPECT_TRUE(contains(message_of<UsageError>([&] {
                         make_learning_rate_schedule(hvd::SchedulerType::kLinear, 0, 0, sgd);
                       }),
                       "at least 1 step in all, got 0"));
}

}  // namespace
}  // namespace hvd::testing
