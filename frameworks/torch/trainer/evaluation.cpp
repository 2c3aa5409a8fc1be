#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "operations/agreement.h"
#include "trainer/trainer_core.h"

namespace hvd::libtorch {
namespace {

/// Sets a module to evaluation mode for a scope.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module)
      : module_(module), was_training_(module.is_training()) {
    module_.eval();
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;
  ~EvaluationMode() { module_.train(was_training_); }

 private:
  torch::nn::Module& module_;
  const bool was_training_;
};

/// The rows of one rank, batch by batch. The loader gives sample i to rank i mod N.
class RowsOfRank {
 public:
  /// @param samples size of the batch
  void add(const torch::Tensor& rows, std::size_t samples, const char* what) {
    if (!rows.defined() || !error_.empty()) return;
    const auto count = static_cast<std::size_t>(rows.dim() == 0 ? 0 : rows.size(0));
    if (count == 0 || count % samples != 0 ||
        (!batches_.empty() && count / samples != rows_per_sample_)) {
      error_ = text("Trainer: prediction_step() has returned ", what, " with ", count,
                    " rows for a batch of ", samples,
                    " samples; expected one row, or the same number of rows, for each "
                    "sample");
      return;
    }
    rows_per_sample_ = count / samples;
    batches_.push_back(rows.detach());
  }
  /// Why a batch was not added; empty if all were.
  const std::string& error() const noexcept { return error_; }
  Fact fact(const char* what) const {
    return {text("rows of ", what, " for each sample"),
            std::to_string(batches_.empty() ? 0 : rows_per_sample_)};
  }
  bool empty() const noexcept { return batches_.empty(); }

  /// The rows of all ranks, in the order of the data set of `samples` samples, on the CPU.
  /// Collective.
  torch::Tensor gather(std::size_t samples, const char* name) const {
    torch::Tensor all = allgather(torch::cat(batches_).contiguous(), {.name = name}).cpu();
    const auto ranks = static_cast<std::size_t>(size());
    if (ranks == 1) return all;
    std::vector<std::size_t> first(ranks);  // each rank's first sample in `all`
    for (std::size_t rank = 1; rank < ranks; ++rank)
      first[rank] = first[rank - 1] + (samples + ranks - rank) / ranks;
    std::vector<std::int64_t> order;
    order.reserve(samples * rows_per_sample_);
    for (std::size_t sample = 0; sample < samples; ++sample) {
      const std::size_t at = first[sample % ranks] + sample / ranks;
      for (std::size_t row = 0; row < rows_per_sample_; ++row)
        order.push_back(static_cast<std::int64_t>(at * rows_per_sample_ + row));
    }
    return all.index_select(0, torch::tensor(order, torch::kInt64));
  }

 private:
  std::vector<torch::Tensor> batches_;
  std::size_t rows_per_sample_ = 1;
  std::string error_;
};

Values with_prefix(const Values& values, const std::string& prefix) {
  Values named;
  for (const auto& [name, value] : values)
    named[name.starts_with(prefix) ? name : prefix + name] = value;
  return named;
}

/// The time of an evaluation and its speed.
Values speed_of(const Stopwatch& watch, std::size_t samples, std::size_t batches) {
  const double seconds = watch.seconds();
  return {{"runtime", seconds},
          {"samples_per_second", static_cast<double>(samples) / seconds},
          {"steps_per_second", static_cast<double>(batches) / seconds}};
}

}  // namespace

EvaluationOutput TrainerCore::run_evaluation(BatchSource& set, const std::string& prefix,
                                             bool loss_only) {
  const auto batch_size = static_cast<std::size_t>(arguments.per_device_eval_batch_size);
  // Each sample counts once, and ranks may have different numbers of batches.
  set.open(*accelerator,
           {.batch_size = arguments.per_device_eval_batch_size,
            .workers = arguments.dataloader_num_workers,
            .shuffle = false,
            .seed = arguments.data_seed.value_or(arguments.seed),
            .remainder = Remainder::kUneven,
            .name = "trainer." + prefix},
           /*train=*/false);
  const std::size_t samples = set.samples().value_or(0);
  const auto ranks = static_cast<std::size_t>(size());
  if (samples < ranks) {
    throw UsageError(text("Trainer: the data set has ", samples, " samples, and the job has ",
                          ranks, " ranks; expected at least one sample for each rank"));
  }
  const Stopwatch watch;
  const EvaluationMode evaluation(*model);
  const torch::NoGradGuard no_grad;
  Metric loss("trainer.evaluation_loss");
  bool has_loss = false;
  RowsOfRank predictions, labels;
  std::size_t left = (samples + ranks - 1 - static_cast<std::size_t>(rank())) / ranks;
  while (const void* const batch = set.next()) {
    const std::size_t own = std::min(batch_size, left);
    left -= own;
    const Autocast autocast = accelerator->autocast();
    const PredictionStep step = trainer.prediction_of(batch, loss_only);
    if (step.loss.defined()) {
      loss.update(step.loss.mean(), static_cast<double>(own));
      has_loss = true;
    }
    if (loss_only) continue;
    predictions.add(step.predictions, own, "predictions");
    labels.add(step.label_ids, own, "labels");
  }

  if (!loss_only) {
    agree({.name = "trainer.rows",
           .title = "Trainer: prediction_step()",
           .expected = "expected the same number on every rank"},
          predictions.error().empty() ? labels.error() : predictions.error(),
          {predictions.fact("predictions"), labels.fact("labels")});
  }
  EvaluationOutput output;
  Values metrics;
  if (!predictions.empty())
    output.gathered.predictions = predictions.gather(samples, "trainer.predictions");
  if (!labels.empty()) output.gathered.label_ids = labels.gather(samples, "trainer.labels");
  if (trainer.compute_metrics && !predictions.empty() && !labels.empty())
    metrics = trainer.compute_metrics(output.gathered);
  if (has_loss) metrics["loss"] = loss.compute();
  const std::size_t batches = ((samples + ranks - 1) / ranks + batch_size - 1) / batch_size;
  for (const auto& [name, value] : speed_of(watch, samples, batches)) metrics[name] = value;
  output.metrics = broadcast_object(with_prefix(metrics, prefix + "_"));
  return output;
}

Values TrainerCore::evaluate(const std::string& prefix) {
  if (!eval_set_) {
    throw UsageError(
        "Trainer::evaluate: there is no evaluation set; pass one to the constructor or to "
        "evaluate()");
  }
  return evaluate_on(*eval_set_, prefix);
}

Values TrainerCore::evaluate_on(BatchSource& set, const std::string& prefix) {
  const bool loss_only = trainer.compute_metrics == nullptr;
  Values metrics = run_evaluation(set, prefix, loss_only).metrics;
  log(metrics);
  raise_log_error();
  metrics["epoch"] = state.epoch;
  call(&TrainerCallback::on_evaluate, metrics);
  return metrics;
}

PredictionOutput TrainerCore::predict_on(BatchSource& set, const std::string& prefix) {
  EvaluationOutput output = run_evaluation(set, prefix, /*loss_only=*/false);
  if (!output.gathered.predictions.defined()) {
    throw UsageError(
        "Trainer::predict: prediction_step() has returned no predictions; override it to return "
        "them, or give the model a forward() that takes inputs.data");
  }
  call(&TrainerCallback::on_predict, output.metrics);
  return {.predictions = std::move(output.gathered.predictions),
          .label_ids = std::move(output.gathered.label_ids),
          .metrics = std::move(output.metrics)};
}

void TrainerCore::evaluate_and_compare() {
  const Values metrics = evaluate("eval");
  const std::string name = best_metric_name(arguments);
  const double* const value = find_metric(metrics, name);
  if (value == nullptr) {
    if (arguments.metric_for_best_model.empty() && !arguments.load_best_model_at_end) return;
    std::vector<std::string> names;
    for (const auto& [each, unused] : metrics) names.push_back(each);
    throw UsageError(text("Trainer: metric_for_best_model is '", name,
                          "', which the evaluation does not give; expected one of ",
                          join_text(names, ", ")));
  }
  const bool better =
      !state.best_metric || std::isnan(*state.best_metric) ||
      (arguments.greater_is_best() ? *value > *state.best_metric : *value < *state.best_metric);
  if (!better) return;
  state.best_metric = *value;
  state.best_global_step = state.global_step;
}

}  // namespace hvd::libtorch
