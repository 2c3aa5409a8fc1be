#include "hvd/torch/trainer_callback.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/torch/training_state.h"
#include "trainer/trainer_core.h"

namespace hvd {

void TrainerCallback::add_state(TrainingState& /*state*/, const std::string& /*name*/) {}

EarlyStopping::EarlyStopping(int patience, double threshold)
    : patience_(patience), threshold_(threshold) {
  if (patience < 1) {
    throw UsageError(text("EarlyStopping: patience is ", patience, "; expected at least 1"));
  }
  if (!(threshold >= 0)) {
    throw UsageError(text("EarlyStopping: threshold is ", threshold, "; expected at least 0"));
  }
}

void EarlyStopping::on_train_begin(const TrainingArguments& arguments, const TrainerState& state,
                                   TrainerControl& /*control*/) {
  if (state.global_step == 0) without_improvement_ = 0;  // of an earlier training
  if (arguments.eval_strategy != Interval::kNo) return;
  throw UsageError(
      "EarlyStopping: eval_strategy is no; set it to steps or epoch, so that there are evaluations "
      "to compare");
}

void EarlyStopping::on_evaluate(const TrainingArguments& arguments, const TrainerState& state,
                                TrainerControl& control, const Values& metrics) {
  const std::string name = libtorch::best_metric_name(arguments);
  const double* const value = libtorch::find_metric(metrics, name);
  if (value == nullptr) {
    const auto of_training = [](const auto& entry) { return entry.first.starts_with("eval_"); };
    if (std::none_of(metrics.begin(), metrics.end(), of_training)) return;
    throw UsageError(text("EarlyStopping: metric_for_best_model is '", name,
                          "', which the evaluation does not give; name one of its values"));
  }
  const bool better =
      !state.best_metric ||
      ((arguments.greater_is_best() ? *value > *state.best_metric : *value < *state.best_metric) &&
       std::abs(*value - *state.best_metric) > threshold_);
  without_improvement_ = better ? 0 : without_improvement_ + 1;
  if (without_improvement_ >= patience_) control.should_training_stop = true;
}

void EarlyStopping::add_state(TrainingState& state, const std::string& name) {
  state.value(name + ".without_improvement", without_improvement_);
}

}  // namespace hvd
