#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace at {
class Tensor;
}

namespace torch::optim {
class Optimizer;
}

namespace CLI {
class App;
}

namespace hvd {

/// @addtogroup train
/// @{

/// How often a Trainer evaluates, saves or logs.
enum class Interval {
  kNo,     ///< never
  kSteps,  ///< every so many optimizer steps
  kEpoch,  ///< at the end of each epoch
};

/// How a Trainer changes the learning rate. Each begins with a linear warm-up from 0 if the
/// arguments ask for one.
enum class SchedulerType {
  kLinear,    ///< falls linearly to 0 at the last step
  kCosine,    ///< follows half a period of a cosine to 0 at the last step
  kConstant,  ///< stays at learning_rate
};

/// The optimizers that a Trainer makes itself.
enum class OptimizerType {
  kAdamW,         ///< torch::optim::AdamW
  kAdamWSharded,  ///< the same in a ShardedOptimizer: each rank keeps a part of its state
  kSgd,           ///< torch::optim::SGD without momentum
};

struct TrainingArguments;

/// Makes the program's optimizer for the model's parameters that require grad.
using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const std::vector<at::Tensor>& parameters, const TrainingArguments& arguments)>;

/// The arguments of a Trainer: an aggregate, for designated initializers in this order. Names,
/// meanings and defaults are those of Hugging Face's TrainingArguments. The same on every rank.
///
/// The arguments of a program may come from its source, from a file (read_file()) and from its
/// command line (add_options()); each changes only the arguments that it names.
struct TrainingArguments {
  /// Checkpoints, logs and the arguments themselves are written to this folder.
  std::string output_dir = "trainer_output";
  /// Samples in a batch of one rank; at least 1.
  std::int64_t per_device_train_batch_size = 8;
  std::int64_t per_device_eval_batch_size = 8;
  /// Passes over the training set, greater than 0. A fraction ends within an epoch.
  double num_train_epochs = 3;
  /// Total number of optimizer steps, at least 1; -1: given by num_train_epochs.
  std::int64_t max_steps = -1;
  /// The learning rate after the warm-up, at least 0.
  double learning_rate = 5e-5;
  /// Not applied to biases and to parameters with one dimension, such as those of normalisations.
  double weight_decay = 0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  /// An OptimizerType, or a function that makes an optimizer.
  std::variant<OptimizerType, OptimizerFactory> optim = OptimizerType::kAdamW;
  SchedulerType lr_scheduler_type = SchedulerType::kLinear;
  /// Steps in which the learning rate rises from 0. At most one of warmup_steps and warmup_ratio
  /// may be set.
  std::int64_t warmup_steps = 0;
  /// The same as a part of all steps, from 0 to 1.
  double warmup_ratio = 0;
  /// Batches whose gradients are averaged before a step; at least 1.
  std::int64_t gradient_accumulation_steps = 1;
  /// Gradients with a larger total norm are scaled down to this norm before a step; 0: never.
  double max_grad_norm = 1;
  /// Computes in float16 with a GradScaler. Not together with bf16.
  bool fp16 = false;
  /// Computes in bfloat16.
  bool bf16 = false;
  Interval eval_strategy = Interval::kNo;
  /// Optimizer steps between two evaluations, with kSteps. Not set: logging_steps.
  std::optional<std::int64_t> eval_steps = {};
  Interval save_strategy = Interval::kSteps;
  std::int64_t save_steps = 500;
  /// How many of the newest checkpoints to keep, besides the best one. Not set: all.
  std::optional<std::int64_t> save_total_limit = {};
  Interval logging_strategy = Interval::kSteps;
  std::int64_t logging_steps = 500;
  /// At the end, loads the checkpoint with the best metric_for_best_model. save_strategy and
  /// eval_strategy must be the same, and save_steps a multiple of eval_steps.
  bool load_best_model_at_end = false;
  /// The name of a value that evaluate() returns, with or without "eval_". Empty: "loss".
  std::string metric_for_best_model = {};
  /// Not set: true unless the metric's name ends with "loss".
  std::optional<bool> greater_is_better = {};
  /// Seeds the random streams of the model and, unless data_seed is set, the order of samples.
  std::uint64_t seed = 42;
  std::optional<std::uint64_t> data_seed = {};
  /// Threads of each rank that load batches; 0: the training thread.
  std::int64_t dataloader_num_workers = 0;
  /// Leaves out the samples that do not fill a batch on every rank.
  bool dataloader_drop_last = false;
  /// Prints no progress bar.
  bool disable_progress = false;
  /// Where values are logged besides the standard output: "csv", "json", "tensorboard".
  std::vector<std::string> report_to = {};
  /// How long a rank waits in an operation for another rank, in seconds.
  std::chrono::seconds ddp_timeout = std::chrono::seconds(1800);
  /// Every so many steps, computes a batch twice and on a second rank, and compares the gradients
  /// bit for bit; 0: never. A difference is a CorruptionError.
  std::int64_t replay_every = 0;

  /// Adds an option for each argument: "--learning_rate", or "--learning-rate". `app` must not
  /// outlive these arguments. The current values are the defaults. Values are written as in
  /// read_file(); a bool without a value is true, and report_to takes a list separated by commas.
  /// `optim` takes the name of an OptimizerType.
  void add_options(CLI::App& app);
  /// Reads values from a YAML or JSON file that has a map with the names above as its keys.
  /// Enumerations are "no", "steps", "epoch"; "linear", "cosine", "constant"; "adamw",
  /// "adamw_sharded", "sgd". @throws UsageError that names the file, the key and the value, for a
  /// file that cannot be read, an unknown key and a value of another type; the arguments are
  /// unchanged then
  void read_file(const std::filesystem::path& file);
  /// Returns a JSON object of all values. An OptimizerFactory is written as "own".
  std::string to_json() const;
  /// @throws UsageError that names the argument, its value and what to do, for a value out of range
  /// and for arguments that contradict each other
  void check() const;

  /// The number of optimizer steps between two evaluations: eval_steps, or logging_steps.
  std::int64_t steps_between_evaluations() const { return eval_steps.value_or(logging_steps); }
  /// Whether a greater metric_for_best_model is better.
  bool greater_is_best() const;
};

/// @}

}  // namespace hvd
