#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerator/core.h"
#include "hvd/torch/progress_bar.h"
#include "hvd/trainer.h"
#include "trainer/learning_rate_schedule.h"
#include "trainer/replay_check.h"
#include "trainer/training_log.h"

namespace hvd::libtorch {

using Values = std::map<std::string, double>;

/// Measures seconds from its construction.
class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The results of one pass over a data set.
struct EvaluationOutput {
  EvalPrediction gathered;
  Values metrics;
};

/// The state and the functions of a Trainer that do not depend on its types. Not thread-safe.
///
/// Files: trainer.cpp has construction and the checks of arguments; training_loop.cpp the loop;
/// elastic_training.cpp the loop's entries in an elastic job; evaluation.cpp evaluations;
/// trainer_checkpoints.cpp checkpoints and resumes.
class TrainerCore {
 public:
  /// Joins the job, checks the arguments on all ranks, and prepares the model. Collective.
  TrainerCore(TrainerBase& trainer, std::shared_ptr<torch::nn::Module> model,
              TrainingArguments arguments, std::unique_ptr<BatchSource> train,
              std::unique_ptr<BatchSource> eval);
  TrainerCore(const TrainerCore&) = delete;
  TrainerCore& operator=(const TrainerCore&) = delete;
  ~TrainerCore();

  TrainOutput train(const ResumeFrom& resume_from_checkpoint);
  /// Evaluates on the data set of the constructor. Collective.
  Values evaluate(const std::string& prefix);
  Values evaluate_on(BatchSource& set, const std::string& prefix);
  PredictionOutput predict_on(BatchSource& set, const std::string& prefix);
  void log(const Values& values);
  void save_model(const std::optional<std::filesystem::path>& folder);

  TrainerBase& trainer;
  const JobMembership job;
  const TrainingArguments arguments;
  const std::shared_ptr<torch::nn::Module> model;
  std::optional<Accelerator> accelerator;
  TrainerState state;
  std::vector<std::shared_ptr<TrainerCallback>> callbacks;

 private:
  /// The part of a checkpoint that TrainerState does not contain.
  struct LoopState {
    double loss_sum = 0;                      ///< of the logged steps' mean losses
    std::int64_t logged_step = 0;             ///< the last step in loss_sum
    double grad_norm = 0, learning_rate = 0;  ///< of the last step
    bool stop_requested = false;              ///< a callback has stopped the training
    bool epoch_stop_requested = false;        ///< a callback has stopped the epoch
    bool in_epoch = false;  ///< the end of the current epoch is still to be handled
  };

  /// The part of the state in an elastic job that a checkpoint does not contain.
  struct ElasticState {
    std::int64_t global_batch = 0;      ///< samples of a batch on all ranks; 0: not known yet
    std::uint64_t epoch = 0, used = 0;  ///< the position in the training set
    double unlogged_loss = 0;           ///< the sum of the steps' mean losses since the last log
    std::string checkpoint = {};        ///< to load at first; may be empty
    bool begun = false;                 ///< `checkpoint` was loaded
    bool due = false;                   ///< finish_step() has not ended
  };

  void check_arguments() const;
  /// The error text that depends on the number of ranks; may be empty.
  std::string error_for_ranks() const;
  DataLoaderOptions train_options() const;
  std::int64_t batches_per_epoch() const;
  std::int64_t samples_per_batch() const;

  // training_loop.cpp
  void prepare_training();
  /// Computes the values that depend on the number of ranks, and opens the training set.
  void open_training();
  TrainOutput train_loop();
  void print_header() const;
  void run_epoch();
  void train_on(const void* batch);
  /// Computes the loss of a batch and its gradients, in a step that replay_every selects several
  /// times. @return the loss
  torch::Tensor compute_gradients(const void* batch);
  void step_optimizer();
  void update_epoch();
  /// Follows the requests of the arguments and the callbacks, and ends the process after SIGTERM.
  void log_evaluate_save();
  /// The same in a step that is committed.
  void finish_step();
  void log_training_loss();
  /// Raises an error of log() on every rank. Collective.
  void raise_log_error();
  /// Adds the mean loss of the steps since the last call to loop_.loss_sum. Collective. @return it
  double fold_loss();
  TrainOutput finish_training(const Stopwatch& watch);
  /// Gives every rank the requests that the callbacks of any rank have made. Collective.
  void exchange_requests();
  /// Sets terminated_ if any rank had received SIGTERM before the last call. Collective.
  void exchange_termination();
  void stop_if_terminated();
  /// Calls a function of every callback with the arguments, the state, the control and `values`.
  template <class Function, class... V>
  void call(Function function, const V&... values);

  // elastic_training.cpp
  TrainOutput train_elastic(const ResumeFrom& from);
  TrainOutput enter_generation();
  TrainingState elastic_state();
  /// In an elastic job: marks the end of a step, or of the work that follows the step.
  void commit();
  /// This rank's samples of the current batch, in an elastic job.
  std::int64_t own_samples() const;
  /// Adds the mean loss of a step to those that are logged next. Collective.
  void add_step_loss();

  // evaluation.cpp
  EvaluationOutput run_evaluation(BatchSource& set, const std::string& prefix, bool loss_only);
  void evaluate_and_compare();

  // trainer_checkpoints.cpp
  TrainingState training_state();
  void save_checkpoint();
  /// Writes the training state to the checkpoint's folder. Collective.
  void write_state(const std::filesystem::path& folder);
  /// Removes the checkpoints of an earlier run after `step`, and those that save_total_limit does
  /// not keep.
  void remove_old(std::int64_t step) const;
  void write_description(const std::filesystem::path& folder) const;
  /// Checks the resume argument and output_dir. @return a checkpoint's folder, or an empty text
  std::string choose_checkpoint(const ResumeFrom& from) const;
  /// Chooses a checkpoint on rank 0, and loads it. Collective.
  void resume(const ResumeFrom& from);
  /// Loads a checkpoint unless the text is empty, and opens the log. Collective.
  void load_chosen(const std::string& chosen);
  void start_elastic(const ResumeFrom& from);
  /// Records on rank 0 that this job writes to output_dir. Collective.
  void claim_output_dir();
  void open_log();
  /// Opens the log on rank 0. Collective.
  void reopen_log();
  void load_best_model();

  TrainerControl control_;
  LoopState loop_;
  std::unique_ptr<BatchSource> train_set_, eval_set_;
  std::unique_ptr<torch::optim::Optimizer> inner_optimizer_;
  std::unique_ptr<LearningRateSchedule> schedule_;
  AcceleratedOptimizer* optimizer_ = nullptr;
  AcceleratedScheduler* scheduler_ = nullptr;
  std::optional<Metric> loss_;  ///< of the batches since the last log
  std::unique_ptr<TrainingLog> log_;
  std::string log_error_;  ///< why rank 0 could not write to log_
  std::optional<ReplayCheck> replay_;
  std::optional<ProgressBar> progress_;
  std::int64_t batches_in_step_ = 0, batches_of_step_ = 1;  ///< so far, and in all
  std::int64_t batch_samples_ = 0;                          ///< of the current batch, on all ranks
  const bool elastic_job_;                                  ///< train() enters elastic::run()
  ElasticState elastic_;
  bool train_open_ = false;          ///< train_set_ has a position
  std::int64_t first_step_ = 0;      ///< the step at which this run has begun
  std::int64_t saved_step_ = -1;     ///< the step of the newest checkpoint of this process
  std::size_t samples_trained_ = 0;  ///< by all ranks in this process
  Handle termination_;               ///< the exchange of the last step
  bool terminated_ = false;
};

template <class Function, class... V>
void TrainerCore::call(Function function, const V&... values) {
  // A callback may add another one.
  for (std::size_t i = 0; i < callbacks.size(); ++i) {
    const std::shared_ptr<TrainerCallback> callback = callbacks[i];
    (callback.get()->*function)(arguments, state, control_, values...);
  }
}

// trainer.cpp

/// The value of a metric whose name may lack "eval_"; null if `metrics` does not have it.
const double* find_metric(const Values& metrics, const std::string& name);
/// TrainingArguments::metric_for_best_model, or "loss".
std::string best_metric_name(const TrainingArguments& arguments);

}  // namespace hvd::libtorch
