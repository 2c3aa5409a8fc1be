#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "hvd/accelerator.h"
#include "hvd/error.h"
#include "hvd/torch/batch_codec.h"
#include "hvd/torch/corruption_error.h"
#include "hvd/torch/trainer_callback.h"
#include "hvd/torch/trainer_templates.h"
#include "hvd/torch/training_arguments.h"

/// A training loop with evaluations, checkpoints and logs, modelled on Hugging Face's Trainer.
/// docs/trainer.md is the guide.
namespace hvd {

/// @addtogroup train
/// @{

/// The result of Trainer::train().
struct TrainOutput {
  std::int64_t global_step = 0;  ///< optimizer steps, with those of earlier runs
  double training_loss = 0;      ///< the mean over all steps and ranks
  /// train_runtime (seconds), train_samples_per_second and train_steps_per_second (of this run,
  /// over all ranks, by this rank's clock), train_loss and epoch.
  std::map<std::string, double> metrics = {};
};

/// The result of Trainer::prediction_step() for one batch of one rank. Undefined tensors stand for
/// absent results; the same ones are absent in every batch and on every rank.
struct PredictionStep {
  /// The mean over the batch, of shape [].
  torch::Tensor loss = {};
  /// The shape is [rows, ...], where each sample of the batch has the same number of rows, mostly
  /// one. All dimensions but the first are the same in every batch.
  torch::Tensor predictions = {};
  /// The same for the labels.
  torch::Tensor label_ids = {};
};

/// The predictions and labels of a whole data set on the CPU, in its order, each sample once.
struct EvalPrediction {
  torch::Tensor predictions = {};
  torch::Tensor label_ids = {};
};

/// Computes metrics by name from the predictions of a whole data set.
using ComputeMetrics = std::function<std::map<std::string, double>(const EvalPrediction&)>;

/// The result of Trainer::predict(), the same on every rank.
struct PredictionOutput {
  torch::Tensor predictions = {};  ///< as EvalPrediction::predictions
  torch::Tensor label_ids = {};    ///< undefined for a data set without labels
  std::map<std::string, double> metrics = {};
};

/// The checkpoint from which Trainer::train() continues: `true`, the folder of a checkpoint, or
/// no checkpoint.
class ResumeFrom {
 public:
  ResumeFrom() = default;
  /// true: the newest checkpoint in TrainingArguments::output_dir.
  template <std::same_as<bool> Bool>
  ResumeFrom(Bool newest) : newest_(newest) {}
  /// The folder of a checkpoint, such as "out/checkpoint-500". No value: no checkpoint.
  template <std::convertible_to<std::optional<std::filesystem::path>> Folder>
    requires(!std::same_as<Folder, bool>)
  ResumeFrom(const Folder& folder) : folder_(folder) {}

  bool newest() const noexcept { return newest_; }
  const std::optional<std::filesystem::path>& folder() const noexcept { return folder_; }

 private:
  bool newest_ = false;
  std::optional<std::filesystem::path> folder_;
};

/// The newest complete checkpoint in a Trainer's output_dir; no value if there is none. A program
/// that resumes if it can calls `trainer.train(hvd::get_last_checkpoint(output_dir))`. Local.
/// @throws CheckpointError when the folder cannot be read
std::optional<std::filesystem::path> get_last_checkpoint(const std::filesystem::path& output_dir);

/// The exit code of a process whose Trainer has received SIGTERM and saved a checkpoint: 128 +
/// SIGTERM.
inline constexpr int kTerminatedExitCode = 143;

namespace libtorch {

class TrainerCore;

}  // namespace libtorch

/// The part of a Trainer that does not depend on the types of its model and its batches.
class TrainerBase {
 public:
  TrainerBase(const TrainerBase&) = delete;
  TrainerBase& operator=(const TrainerBase&) = delete;
  virtual ~TrainerBase();

  /// Trains the model until the arguments' last step or epoch, or until a callback stops it.
  /// Collective.
  ///
  /// With a checkpoint, the training continues after its step; on the same number of ranks, all
  /// parameters and logged values become those of an uninterrupted run, bit for bit. Otherwise it
  /// starts with the model's present parameters, a new optimizer, and random streams from
  /// TrainingArguments::seed; later checkpoints of an earlier run in output_dir are removed by the
  /// first checkpoint. May be called again.
  ///
  /// In an elastic job ('hvdrun --min-np') it enters elastic::run(), survives the loss of ranks and
  /// takes in new ones: docs/trainer.md. It can be called once there.
  ///
  /// If any rank receives SIGTERM, all ranks save a checkpoint, leave the job, and end their
  /// processes with kTerminatedExitCode; the call does not return. In an elastic job SIGTERM ends
  /// the process that receives it, and the others continue.
  /// @throws UsageError or MismatchError, on every rank, without a training set, for a resume
  /// without a checkpoint, and when output_dir contains checkpoints of a run with other arguments;
  /// CorruptionError, on every rank, for a difference that replay_every has found; as
  /// load_checkpoint(), save_checkpoint(), compute_loss() and every collective
  TrainOutput train(const ResumeFrom& resume_from_checkpoint = {});

  /// Evaluates the model on the data set of the constructor, and logs the result. Collective.
  /// @return eval_loss (the mean over all samples), the values of compute_metrics with names that
  /// begin with `metric_key_prefix`, eval_runtime (seconds), eval_samples_per_second,
  /// eval_steps_per_second and epoch; the same on every rank
  /// @throws UsageError without an evaluation set
  std::map<std::string, double> evaluate(const std::string& metric_key_prefix = "eval");

  /// Writes the model to `folder`/model.safetensors. Not set: to output_dir. Collective. @throws as
  /// Accelerator::save_model()
  void save_model(const std::optional<std::filesystem::path>& folder = std::nullopt);
  /// Prints the values on rank 0, adds them to state().log_history and, after the beginning of
  /// train(), to the logs of TrainingArguments::report_to, and calls on_log() of the callbacks.
  /// @param values the same on every rank
  void log(const std::map<std::string, double>& values);
  /// Adds a callback after those that were added before. Add the same callbacks on every rank,
  /// since a Trainer with callbacks runs additional collectives. @throws UsageError for a null
  /// pointer
  void add_callback(std::shared_ptr<TrainerCallback> callback);
  /// The same for an object that is moved, such as `EarlyStopping(3)`.
  template <std::derived_from<TrainerCallback> Callback>
  void add_callback(Callback callback) {
    add_callback(
        std::static_pointer_cast<TrainerCallback>(std::make_shared<Callback>(std::move(callback))));
  }

  const TrainerState& state() const noexcept;
  const TrainingArguments& args() const noexcept;
  Accelerator& accelerator() noexcept;
  bool is_world_process_zero() const noexcept { return state().is_world_process_zero; }

  /// If set, evaluate() and predict() gather predictions and labels and add its result. Called on
  /// every rank; the values of rank 0 count.
  ComputeMetrics compute_metrics;

 protected:
  /// @param train null: the trainer only evaluates and predicts
  /// @param eval null: evaluate() and eval_strategy need a data set
  TrainerBase(std::shared_ptr<torch::nn::Module> model, TrainingArguments arguments,
              std::unique_ptr<libtorch::BatchSource> train,
              std::unique_ptr<libtorch::BatchSource> eval, ComputeMetrics metrics);

  std::map<std::string, double> evaluate_on(libtorch::BatchSource& set, const std::string& prefix);
  PredictionOutput predict_on(libtorch::BatchSource& set, const std::string& prefix);

 private:
  friend class libtorch::TrainerCore;

  virtual torch::Tensor loss_of(const void* batch) = 0;
  // For replay_every.
  /// @throws UsageError if batches cannot be sent to other ranks
  virtual void check_sendable() const = 0;
  virtual std::string encode(const void* batch) const = 0;
  virtual torch::Tensor loss_of_encoded(std::string_view batch) = 0;
  virtual PredictionStep prediction_of(const void* batch, bool prediction_loss_only) = 0;

  std::unique_ptr<libtorch::TrainerCore> core_;
};

/// Trains, evaluates and applies a model on any number of ranks, with the interface of Hugging
/// Face's Trainer. Derive from it and override compute_loss():
///
///     struct MyTrainer : hvd::Trainer<Net> {
///       using Trainer::Trainer;
///       torch::Tensor compute_loss(Net& model, const torch::data::Example<>& inputs) override {
///         return torch::nll_loss(model->forward(inputs.data), inputs.target);
///       }
///     };
///     MyTrainer trainer(net, {.output_dir = "out", .num_train_epochs = 1}, train_set, test_set);
///     trainer.train();
///
/// `Model` is a module holder (TORCH_MODULE) or a shared_ptr to a module. `Example` is the type of
/// a batch, which the data sets' get_batch() returns; a data set of torch::data::Example<> that
/// returns vectors of them is stacked (torch::data::transforms::Stack).
///
/// Every rank makes the same calls with equal arguments. N ranks with batches of b samples train as
/// one rank with batches of N x b, up to rounding. Not thread-safe.
template <class Model, class Example = torch::data::Example<>>
class Trainer : public TrainerBase {
 public:
  using TrainerBase::evaluate;

  /// Calls init() unless the program has; the destructor then calls shutdown(). Moves the model to
  /// the device and gives it rank 0's parameters. Collective, except in an elastic job.
  /// @param eval_set the data set of evaluate() and of TrainingArguments::eval_strategy
  /// @param metrics sets compute_metrics
  /// @throws UsageError or MismatchError, on every rank, that names the argument, its value and
  /// what to do: for an argument out of range; for arguments that contradict each other, such as
  /// eval_strategy without an evaluation set and a metric_for_best_model that no evaluation gives;
  /// for a data set without a size or with fewer samples than ranks; when ranks' arguments differ;
  /// and as init()
  template <libtorch::DatasetType TrainSet, libtorch::DatasetType EvalSet>
  Trainer(Model model, TrainingArguments arguments, TrainSet train_set, EvalSet eval_set,
          ComputeMetrics metrics = nullptr)
      : TrainerBase(libtorch::module_pointer(model), std::move(arguments),
                    libtorch::batches_of<Example>(std::move(train_set)),
                    libtorch::batches_of<Example>(std::move(eval_set)), std::move(metrics)),
        model_(std::move(model)) {}
  /// The same without an evaluation set.
  template <libtorch::DatasetType TrainSet>
  Trainer(Model model, TrainingArguments arguments, TrainSet train_set,
          ComputeMetrics metrics = nullptr)
      : TrainerBase(libtorch::module_pointer(model), std::move(arguments),
                    libtorch::batches_of<Example>(std::move(train_set)), nullptr,
                    std::move(metrics)),
        model_(std::move(model)) {}
  /// The same without any data set, for evaluate(set) and predict(set).
  explicit Trainer(Model model, TrainingArguments arguments = {}, ComputeMetrics metrics = nullptr)
      : TrainerBase(libtorch::module_pointer(model), std::move(arguments), nullptr, nullptr,
                    std::move(metrics)),
        model_(std::move(model)) {}

  Model& model() noexcept { return model_; }

  /// The loss of a batch, of shape []: the mean over its samples. Called under
  /// Accelerator::autocast(). Must not call collectives, unless every rank makes the same calls.
  virtual torch::Tensor compute_loss(Model& model, const Example& inputs) = 0;

  /// The loss of a batch and, unless `prediction_loss_only`, its predictions and labels, for
  /// evaluate() and predict(). Called without gradients, with the model in evaluation mode. Must
  /// not call collectives: ranks may have different numbers of batches.
  ///
  /// The default returns compute_loss(); and `model->forward(inputs.data)` and `inputs.target`
  /// where these compile, which computes the forward pass a second time. Override it for other
  /// models and batches, and to compute the forward pass once. For a data set without labels
  /// override it to return no loss and no labels.
  virtual PredictionStep prediction_step(Model& model, const Example& inputs,
                                         bool prediction_loss_only) {
    PredictionStep step{.loss = compute_loss(model, inputs)};
    if constexpr (libtorch::HasForward<Model, Example>) {
      if (prediction_loss_only) return step;
      step.predictions = model->forward(inputs.data);
      step.label_ids = inputs.target;
    }
    return step;
  }

  /// The same as evaluate() for another data set.
  template <libtorch::DatasetType EvalSet>
  std::map<std::string, double> evaluate(EvalSet eval_set,
                                         const std::string& metric_key_prefix = "eval") {
    return evaluate_on(*libtorch::batches_of<Example>(std::move(eval_set)), metric_key_prefix);
  }

  /// The predictions for a data set, in its order, and their metrics: test_loss, those of
  /// compute_metrics, test_runtime, test_samples_per_second and test_steps_per_second. Collective.
  /// @throws UsageError if prediction_step() returns no predictions
  template <libtorch::DatasetType TestSet>
  PredictionOutput predict(TestSet test_set, const std::string& metric_key_prefix = "test") {
    return predict_on(*libtorch::batches_of<Example>(std::move(test_set)), metric_key_prefix);
  }

 private:
  torch::Tensor loss_of(const void* batch) final {
    return compute_loss(model_, *static_cast<const Example*>(batch));
  }
  void check_sendable() const final {
    if constexpr (!libtorch::is_sendable<Example>()) {
      throw UsageError(
          "Trainer: replay_every: batches of this type cannot be sent to another rank; expected "
          "tensors, examples, containers or structs of them: use such a type, or set replay_every "
          "to 0");
    }
  }
  std::string encode(const void* batch) const final {
    if constexpr (libtorch::is_sendable<Example>()) {
      return libtorch::encode_batch(*static_cast<const Example*>(batch));
    } else {
      return {};  // check_sendable() has thrown
    }
  }
  torch::Tensor loss_of_encoded(std::string_view batch) final {
    if constexpr (libtorch::is_sendable<Example>()) {
      return compute_loss(model_, libtorch::decode_batch<Example>(batch));
    } else {
      return {};  // check_sendable() has thrown
    }
  }
  PredictionStep prediction_of(const void* batch, bool prediction_loss_only) final {
    return prediction_step(model_, *static_cast<const Example*>(batch), prediction_loss_only);
  }

  Model model_;
};

/// @}

}  // namespace hvd
