#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hvd/torch/training_arguments.h"

namespace hvd {

class TrainingState;

/// @addtogroup train
/// @{

/// The progress of a Trainer, the same on every rank except where noted. A checkpoint contains it.
struct TrainerState {
  /// Passes over the training set so far; 1.5 is the middle of the second one.
  double epoch = 0;
  /// Optimizer steps so far.
  std::int64_t global_step = 0;
  /// Optimizer steps at the end of the training.
  std::int64_t max_steps = 0;
  /// Passes over the training set at the end of the training, rounded up.
  std::int64_t num_train_epochs = 0;
  /// All values that were logged, each entry with "step" and "epoch".
  std::vector<std::map<std::string, double>> log_history = {};
  /// The best TrainingArguments::metric_for_best_model of the evaluations so far.
  std::optional<double> best_metric = {};
  /// The step of that evaluation.
  std::int64_t best_global_step = 0;
  /// The newest checkpoint that was saved at the step of an evaluation that was then the best. It
  /// is of an earlier step if none was saved at best_global_step. Empty if there is none.
  std::string best_model_checkpoint = {};
  /// Whether this is rank 0.
  bool is_world_process_zero = true;
};

/// Requests to a Trainer. If a callback makes a request on one rank, every rank follows it. Before
/// on_step_end() and on_epoch_end() the Trainer sets should_save, should_evaluate and should_log
/// from its arguments, and these callbacks may change them. Changes of these three in callbacks
/// before these, such as on_substep_end(), have no effect.
struct TrainerControl {
  bool should_training_stop = false;  ///< after this step
  bool should_epoch_stop = false;     ///< after this step; the next epoch follows
  bool should_save = false;           ///< a checkpoint, at this step
  bool should_evaluate = false;       ///< at this step
  bool should_log = false;            ///< the training loss, at this step
};

/// Functions that a Trainer calls, on every rank, in the course of a training. Override some of
/// them, and pass the object to Trainer::add_callback(). Names and order are those of Hugging
/// Face's TrainerCallback:
///
///     on_train_begin
///       on_epoch_begin                       for each epoch
///         on_step_begin                        for each optimizer step
///         on_substep_end                       after each of its batches but the last
///         on_step_end
///         on_log, on_evaluate, on_save         if requested, in this order
///       on_epoch_end
///       on_log, on_evaluate, on_save         if requested
///     on_log                               for the summary
///     on_train_end
class TrainerCallback {
 public:
  using Values = std::map<std::string, double>;

  virtual ~TrainerCallback() = default;
  virtual void on_train_begin(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                              TrainerControl& /*control*/) {}
  virtual void on_train_end(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                            TrainerControl& /*control*/) {}
  virtual void on_epoch_begin(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                              TrainerControl& /*control*/) {}
  virtual void on_epoch_end(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                            TrainerControl& /*control*/) {}
  virtual void on_step_begin(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                             TrainerControl& /*control*/) {}
  virtual void on_substep_end(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                              TrainerControl& /*control*/) {}
  virtual void on_step_end(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                           TrainerControl& /*control*/) {}
  /// `state` does not include this evaluation's metric yet.
  virtual void on_evaluate(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                           TrainerControl& /*control*/, const Values& /*metrics*/) {}
  virtual void on_predict(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                          TrainerControl& /*control*/, const Values& /*metrics*/) {}
  virtual void on_save(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                       TrainerControl& /*control*/) {}
  virtual void on_log(const TrainingArguments& /*arguments*/, const TrainerState& /*state*/,
                      TrainerControl& /*control*/, const Values& /*logs*/) {}

  /// Adds the callback's own state to checkpoints, for example
  /// `state.value(name + ".count", count_)`. @param name begins the names of the items
  virtual void add_state(TrainingState& state, const std::string& name);
};

/// Stops the training when TrainingArguments::metric_for_best_model has not improved for a number
/// of evaluations, as Hugging Face's EarlyStoppingCallback.
class EarlyStopping final : public TrainerCallback {
 public:
  /// @param patience evaluations in succession without improvement, at least 1, that stop the
  /// training @param threshold an improvement is greater than this, at least 0
  /// @throws UsageError for values out of range
  explicit EarlyStopping(int patience = 1, double threshold = 0);

  /// @throws UsageError if the arguments do not ask for evaluations
  void on_train_begin(const TrainingArguments& arguments, const TrainerState& state,
                      TrainerControl& control) override;
  /// Has no effect after evaluate() with another prefix than "eval". @throws UsageError if the
  /// evaluation does not give metric_for_best_model
  void on_evaluate(const TrainingArguments& arguments, const TrainerState& state,
                   TrainerControl& control, const Values& metrics) override;
  void add_state(TrainingState& state, const std::string& name) override;

 private:
  const int patience_;
  const double threshold_;
  std::int64_t without_improvement_ = 0;
};

/// @}

}  // namespace hvd
