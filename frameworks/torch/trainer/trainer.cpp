#include "hvd/trainer.h"

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "operations/agreement.h"
#include "operations/membership.h"
#include "trainer/trainer_core.h"

namespace hvd {
namespace libtorch {
namespace {

bool is_sharded(const TrainingArguments& arguments) {
  const auto* const optim = std::get_if<OptimizerType>(&arguments.optim);
  return optim != nullptr && *optim == OptimizerType::kAdamWSharded;
}

AcceleratorOptions accelerator_options(const TrainingArguments& arguments) {
  return {.mixed_precision = arguments.fp16   ? Precision::kFP16
                             : arguments.bf16 ? Precision::kBF16
                                              : Precision::kNo,
          .gradient_accumulation_steps = static_cast<int>(arguments.gradient_accumulation_steps),
          .sharded = is_sharded(arguments)};
}

/// Options of init(), if the trainer calls it.
Options job_options(const TrainingArguments& arguments) {
  Options options;
  // check_arguments() reports a time that is not positive, on all ranks.
  if (arguments.ddp_timeout.count() > 0) options.stall_shutdown = arguments.ddp_timeout;
  return options;
}

/// @return the error text; empty if the data set is valid
std::string error_in_set(const BatchSource* set, const char* which) {
  if (set == nullptr) return {};
  const auto samples = set->samples();
  if (!samples) {
    return text("Trainer: the ", which,
                " set has no size; expected one whose size() returns the number of samples");
  }
  if (waits_for_rank() || *samples >= static_cast<std::size_t>(size())) return {};
  return text("Trainer: the ", which, " set has ", *samples, " samples, and the job has ", size(),
              " ranks; expected at least one sample for each rank: use fewer ranks or a larger "
              "data set");
}

std::string error_in_strategy(const TrainingArguments& arguments, bool has_eval_set,
                              bool has_metrics) {
  if (arguments.eval_strategy != Interval::kNo && !has_eval_set) {
    return text("Trainer: eval_strategy is ",
                arguments.eval_strategy == Interval::kEpoch ? "epoch" : "steps",
                ", and there is no evaluation set; pass one to the constructor, or set "
                "eval_strategy to no");
  }
  const std::string name = best_metric_name(arguments);
  const Values always{{"eval_loss", 0},
                      {"eval_runtime", 0},
                      {"eval_samples_per_second", 0},
                      {"eval_steps_per_second", 0}};
  const bool used = arguments.load_best_model_at_end || !arguments.metric_for_best_model.empty();
  if (used && !has_metrics && find_metric(always, name) == nullptr) {
    return text("Trainer: metric_for_best_model is '", name,
                "', and without compute_metrics evaluations give only loss, runtime, "
                "samples_per_second and steps_per_second; pass compute_metrics to the "
                "constructor, or name one of these");
  }
  return {};
}

}  // namespace

const double* find_metric(const Values& metrics, const std::string& name) {
  auto found = metrics.find(name);
  if (found == metrics.end()) found = metrics.find("eval_" + name);
  return found == metrics.end() ? nullptr : &found->second;
}

std::string best_metric_name(const TrainingArguments& arguments) {
  return arguments.metric_for_best_model.empty() ? "loss" : arguments.metric_for_best_model;
}

TrainerCore::TrainerCore(TrainerBase& base, std::shared_ptr<torch::nn::Module> module,
                         TrainingArguments given, std::unique_ptr<BatchSource> train,
                         std::unique_ptr<BatchSource> eval)
    : trainer(base),
      job(job_options(given)),
      arguments(std::move(given)),
      model(std::move(module)),
      train_set_(std::move(train)),
      eval_set_(std::move(eval)),
      elastic_job_(is_elastic()) {
  check_arguments();
  accelerator.emplace(accelerator_options(arguments));
  accelerator->prepare(model);
  state.is_world_process_zero = !elastic_job_ && rank() == 0;
}

TrainerCore::~TrainerCore() = default;

void TrainerCore::check_arguments() const {
  std::string error;
  try {
    arguments.check();
  } catch (const UsageError& refused) {
    error = refused.what();
  }
  if (error.empty() && !model) error = "Trainer: the model is empty; expected a module";
  if (error.empty()) error = error_for_ranks();
  if (error.empty()) {
    error = error_in_strategy(arguments, eval_set_ != nullptr, trainer.compute_metrics != nullptr);
  }
  if (elastic_job_) {
    if (error.empty() && arguments.replay_every > 0) {
      error =
          "Trainer: replay_every: expected 0 in an elastic job, whose ranks change: set it to 0, "
          "or start the job without elastic options";
    }
    if (!error.empty()) throw UsageError(error);
    return;
  }
  std::vector<Fact> facts;
  const auto all = nlohmann::ordered_json::parse(arguments.to_json());
  for (const auto& [name, value] : all.items()) {
    if (name != "disable_progress") facts.emplace_back(name, value.dump());
  }
  const auto describe = [&](const char* name, const std::unique_ptr<BatchSource>& set) {
    facts.emplace_back(name,
                       !set ? std::string("none") : text(set->samples().value_or(0), " samples"));
  };
  describe("training set", train_set_);
  describe("evaluation set", eval_set_);
  facts.emplace_back("compute_metrics", trainer.compute_metrics ? "a function" : "none");
  agree({.name = "trainer.construct",
         .title = "Trainer",
         .expected = "expected the same arguments on every rank"},
        error, facts);
}

std::string TrainerCore::error_for_ranks() const {
  std::string error = error_in_set(train_set_.get(), "training");
  if (error.empty()) error = error_in_set(eval_set_.get(), "evaluation");
  if (waits_for_rank() || !error.empty() || !train_set_ || batches_per_epoch() > 0) return error;
  return text("Trainer: dataloader_drop_last is true, and the ", *train_set_->samples(),
              " samples of the training set do not fill one batch of ",
              arguments.per_device_train_batch_size, " on each of ", size(),
              " ranks; use a smaller per_device_train_batch_size, or set dataloader_drop_last "
              "to false");
}

DataLoaderOptions TrainerCore::train_options() const {
  const bool drop = arguments.dataloader_drop_last;
  return {.batch_size = elastic_job_ ? 1 : arguments.per_device_train_batch_size,
          .global_batch = elastic_.global_batch,
          .workers = arguments.dataloader_num_workers,
          .seed = arguments.data_seed.value_or(arguments.seed),
          .remainder = drop ? Remainder::kDrop : Remainder::kPad,
          .drop_last = drop,
          .name = "trainer.train"};
}

std::int64_t TrainerCore::batches_per_epoch() const {
  const auto samples = static_cast<std::int64_t>(train_set_->samples().value_or(0));
  const std::int64_t batch = samples_per_batch();
  return arguments.dataloader_drop_last ? samples / batch : (samples + batch - 1) / batch;
}

std::int64_t TrainerCore::samples_per_batch() const {
  if (elastic_.global_batch > 0) return elastic_.global_batch;
  return arguments.per_device_train_batch_size * size();
}

void TrainerCore::save_model(const std::optional<std::filesystem::path>& folder) {
  accelerator->save_model(model, folder.value_or(arguments.output_dir));
}

}  // namespace libtorch

TrainerBase::TrainerBase(std::shared_ptr<torch::nn::Module> model, TrainingArguments arguments,
                         std::unique_ptr<libtorch::BatchSource> train,
                         std::unique_ptr<libtorch::BatchSource> eval, ComputeMetrics metrics)
    : compute_metrics(std::move(metrics)),
      core_(std::make_unique<libtorch::TrainerCore>(*this, std::move(model), std::move(arguments),
                                                    std::move(train), std::move(eval))) {}

TrainerBase::~TrainerBase() = default;

TrainOutput TrainerBase::train(const ResumeFrom& resume_from_checkpoint) {
  return core_->train(resume_from_checkpoint);
}

std::map<std::string, double> TrainerBase::evaluate(const std::string& metric_key_prefix) {
  return core_->evaluate(metric_key_prefix);
}

std::map<std::string, double> TrainerBase::evaluate_on(libtorch::BatchSource& set,
                                                       const std::string& prefix) {
  return core_->evaluate_on(set, prefix);
}

PredictionOutput TrainerBase::predict_on(libtorch::BatchSource& set, const std::string& prefix) {
  return core_->predict_on(set, prefix);
}

void TrainerBase::save_model(const std::optional<std::filesystem::path>& folder) {
  core_->save_model(folder);
}

void TrainerBase::log(const std::map<std::string, double>& values) { core_->log(values); }

void TrainerBase::add_callback(std::shared_ptr<TrainerCallback> callback) {
  if (!callback) throw UsageError("Trainer::add_callback: the callback is null; expected one");
  core_->callbacks.push_back(std::move(callback));
}

const TrainerState& TrainerBase::state() const noexcept { return core_->state; }
const TrainingArguments& TrainerBase::args() const noexcept { return core_->arguments; }
Accelerator& TrainerBase::accelerator() noexcept { return *core_->accelerator; }

}  // namespace hvd
