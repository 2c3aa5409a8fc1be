#include "trainer/learning_rate_schedule.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numbers>
#include <string>
#include <vector>

#include "hvd/error.h"

namespace hvd::libtorch {
LearningRateSchedule::LearningRateSchedule(hvd::SchedulerType type,
                                           torch::optim::Optimizer& optimizer)
    : LRScheduler(optimizer), type_(type), base_rates_(get_current_lrs()) {}

void LearningRateSchedule::set_steps(std::int64_t warmup_steps, std::int64_t total_steps) {
  if (warmup_steps < 0) {
    throw UsageError(
        "learning rate schedule: expected a number of warm-up steps that is at least "
        "0, got " +
        std::to_string(warmup_steps));
  }
  if (total_steps < 1) {
    throw UsageError("learning rate schedule: expected at least 1 step in all, got " +
                     std::to_string(total_steps));
  }
  warmup_steps_ = warmup_steps;
  total_steps_ = total_steps;
}

void LearningRateSchedule::set_first_rates(torch::optim::Optimizer& optimizer) const {
  const std::vector<double> rates = rates_after(0);
  for (std::size_t i = 0; i < rates.size(); ++i)
    optimizer.param_groups()[i].options().set_lr(rates[i]);
}

std::vector<double> LearningRateSchedule::get_lrs() {
  return rates_after(static_cast<std::int64_t>(step_count_) + 1);
}

std::vector<double> LearningRateSchedule::rates_after(std::int64_t step) const {
  std::vector<double> rates = base_rates_;
  for (double& rate : rates) rate *= learning_rate_factor(type_, step, warmup_steps_, total_steps_);
  return rates;
}

double learning_rate_factor(hvd::SchedulerType type, std::int64_t step, std::int64_t warmup_steps,
                            std::int64_t total_steps) {
  const auto part_of = [](std::int64_t part, std::int64_t whole) {
    return static_cast<double>(part) / static_cast<double>(std::max<std::int64_t>(1, whole));
  };
  if (step < warmup_steps) return part_of(step, warmup_steps);
  const std::int64_t decay_steps = total_steps - warmup_steps;
  switch (type) {
    case hvd::SchedulerType::kLinear:
      return std::max(0.0, part_of(total_steps - step, decay_steps));
    case hvd::SchedulerType::kCosine:
      return std::max(
          0.0, 0.5 * (1 + std::cos(std::numbers::pi * part_of(step - warmup_steps, decay_steps))));
    case hvd::SchedulerType::kConstant:
      break;
  }
  return 1;
}

std::int64_t warmup_steps_of(const TrainingArguments& arguments, std::int64_t total_steps) {
  if (arguments.warmup_steps > 0) return arguments.warmup_steps;
  return static_cast<std::int64_t>(
      std::ceil(static_cast<double>(total_steps) * arguments.warmup_ratio));
}

std::unique_ptr<LearningRateSchedule> make_learning_rate_schedule(
    hvd::SchedulerType type, std::int64_t warmup_steps, std::int64_t total_steps,
    torch::optim::Optimizer& optimizer) {
  auto schedule = std::make_unique<LearningRateSchedule>(type, optimizer);
  schedule->set_steps(warmup_steps, total_steps);
  schedule->set_first_rates(optimizer);
  return schedule;
}

}  // namespace hvd::libtorch
