#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "hvd/torch/training_arguments.h"

namespace hvd::libtorch {

/// The factor by which a schedule multiplies the learning rate after `step` optimizer steps. The
/// formulae are those of Hugging Face's get_scheduler() ("linear", "cosine" with half a period,
/// "constant_with_warmup"; transformers/optimization.py).
/// @param warmup_steps steps in which the factor rises from 0 to 1
/// @param total_steps steps of the whole training; not used by SchedulerType::kConstant
double learning_rate_factor(hvd::SchedulerType type, std::int64_t step, std::int64_t warmup_steps,
                            std::int64_t total_steps);

/// The number of warm-up steps: warmup_steps, or warmup_ratio of all steps, rounded up.
std::int64_t warmup_steps_of(const TrainingArguments& arguments, std::int64_t total_steps);

/// A scheduler whose number of steps may become known later, when the number of ranks is.
class LearningRateSchedule : public torch::optim::LRScheduler {
 public:
  LearningRateSchedule(hvd::SchedulerType type, torch::optim::Optimizer& optimizer);
  /// @throws as make_learning_rate_schedule()
  void set_steps(std::int64_t warmup_steps, std::int64_t total_steps);
  /// Sets the learning rates of the next step. Call it before the first one.
  void set_first_rates(torch::optim::Optimizer& optimizer) const;

 private:
  /// LibTorch calls this before it counts the step.
  std::vector<double> get_lrs() override;
  std::vector<double> rates_after(std::int64_t step) const;

  const hvd::SchedulerType type_;
  std::int64_t warmup_steps_ = 0, total_steps_ = 1;
  const std::vector<double> base_rates_;
};

/// Makes a scheduler that multiplies the present learning rate of each parameter group by
/// learning_rate_factor(), and sets the rates of the first step at once. Call step() after each
/// optimizer step. Refers to the optimizer.
///
/// TrainingState::scheduler() saves the number of steps. A resumed program makes the scheduler with
/// a new optimizer, whose learning rates are those of the arguments, before it loads the state.
/// @throws UsageError if warmup_steps is negative, or total_steps less than 1
std::unique_ptr<LearningRateSchedule> make_learning_rate_schedule(
    hvd::SchedulerType type, std::int64_t warmup_steps, std::int64_t total_steps,
    torch::optim::Optimizer& optimizer);

}  // namespace hvd::libtorch
