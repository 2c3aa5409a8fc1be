#include <fcntl.h>
#include <torch/cuda.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bench/commands.h"
#include "bench/model.h"
#include "bench/parameter_sets.h"
#include "hvd/accelerator.h"
#include "hvd/trainer.h"

namespace hvd::bench {
namespace {

using LevelBatch = torch::data::Example<>;

/// A data set with one batch in memory, which get_batch() returns for any indices. An epoch has
/// `steps` batches for each rank.
class RepeatedBatch : public torch::data::datasets::BatchDataset<RepeatedBatch, LevelBatch> {
 public:
  RepeatedBatch(const Session& session, int batch_size, int steps)
      : size_(static_cast<std::size_t>(batch_size) * static_cast<std::size_t>(steps) *
              static_cast<std::size_t>(session.size())) {
    at::manual_seed(static_cast<std::uint64_t>(session.rank()) + 1);
    batch_.data = at::randn({batch_size, 1, 28, 28});
    batch_.target = at::randint(0, 10, {batch_size}, at::kLong);
  }

  LevelBatch get_batch(c10::ArrayRef<std::size_t> /*indices*/) override { return batch_; }
  std::optional<std::size_t> size() const override { return size_; }

 private:
  std::size_t size_;
  LevelBatch batch_;
};

/// The model of all contenders. Records the time of each call of loss_of(), which is the beginning
/// of a step.
class LevelModule : public torch::nn::Module {
 public:
  LevelModule(const ParameterSet& set, int rank)
      : computes_(set.name == "mnist"),
        initial_(initial_values(set)),
        model_(make_model({.set = set}, clones(initial_), rank)) {
    for (std::size_t i = 0; i < initial_.size(); ++i)
      register_parameter("parameter" + std::to_string(i), model_->parameters()[i]);
  }

  at::Tensor loss_of(const LevelBatch& batch) {
    times_.push_back(std::chrono::steady_clock::now());
    if (computes_) return mnist_loss(model_->parameters(), batch.data, batch.target);
    return model_->loss();
  }

  void reset() {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < initial_.size(); ++i) {
      at::Tensor parameter = model_->parameters()[i];
      parameter.copy_(initial_[i]);
      parameter.mutable_grad().reset();
    }
    times_.clear();
  }

  bool computes() const { return computes_; }
  /// Copies of the parameters' values.
  std::vector<at::Tensor> values() const {
    const torch::NoGradGuard no_grad;
    return clones(model_->parameters());
  }
  const std::vector<at::Tensor>& initial() const { return initial_; }
  /// Seconds of each step but the last one.
  std::vector<double> step_seconds() const {
    std::vector<double> seconds;
    for (std::size_t i = 1; i < times_.size(); ++i)
      seconds.push_back(std::chrono::duration<double>(times_[i] - times_[i - 1]).count());
    return seconds;
  }

 private:
  static std::vector<at::Tensor> clones(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
    return copies;
  }

  const bool computes_;
  const std::vector<at::Tensor> initial_;
  const std::unique_ptr<Model> model_;
  std::vector<std::chrono::steady_clock::time_point> times_;
};

using LevelModel = std::shared_ptr<LevelModule>;

class LevelTrainer final : public Trainer<LevelModel> {
 public:
  using Trainer::Trainer;
  at::Tensor compute_loss(LevelModel& model, const LevelBatch& inputs) override {
    return model->loss_of(inputs);
  }
};

/// While it exists, this process's standard output is discarded: train() prints a header and its
/// results.
class DiscardedOutput {
 public:
  DiscardedOutput() : standard_output_(dup(STDOUT_FILENO)) {
    flush();
    const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(null, STDOUT_FILENO);
    close(null);
  }
  DiscardedOutput(const DiscardedOutput&) = delete;
  DiscardedOutput& operator=(const DiscardedOutput&) = delete;
  ~DiscardedOutput() {
    flush();
    dup2(standard_output_, STDOUT_FILENO);
    close(standard_output_);
  }

 private:
  static void flush() {
    std::cout.flush();
    std::fflush(stdout);
  }
  const int standard_output_;
};

/// A folder that the ranks share. The destructor removes it.
class SharedFolder {
 public:
  explicit SharedFolder(const Session& session)
      : path_(std::filesystem::temp_directory_path() /
              ("hvd-bench-levels." +
               std::to_string(static_cast<long>(session.slowest(static_cast<double>(getpid())))))) {
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  ~SharedFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string path() const { return path_.string(); }

 private:
  const std::filesystem::path path_;
};

double squared_distance(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  double sum = 0;
  for (std::size_t i = 0; i < left.size(); ++i)
    sum += (left[i] - right[i]).to(at::kDouble).square().sum().item<double>();
  return sum;
}

struct LevelContender {
  std::string name;
  std::function<void()> run;
  std::vector<double> means = {}, medians = {};  ///< seconds of a step, one for each run
  bool correct = true;
};

/// Compares the contenders with one parameter set. A run of a contender is a whole training, from
/// the construction of its optimizer, so that only one optimizer exists at a time, as in a program.
class LevelsMatch {
 public:
  LevelsMatch(const Session& session, const LevelsOptions& options, const std::string& set)
      : session_(session),
        options_(options),
        set_name_(set),
        steps_(options.lead + options.steps + 1),  // the last step ends the time of the one before
        data_(session, options.batch_size, steps_),
        model_(std::make_shared<LevelModule>(parameter_set(set), session.rank())),
        folder_(session) {
    enter("loop", [this] { run_loop(std::nullopt); });
    enter("loop-again", [this] { run_loop(std::nullopt); });
    enter("accelerator", [this] { run_accelerator(); });
    enter("trainer", [this] { run_trainer(); });
    enter("weighted", [this] { run_loop(options_.batch_size); });
    if (session.size() > 1) {
      enter("weighted-unequal",
            [this] { run_loop(std::int64_t{options_.batch_size} * (1 + session_.rank())); });
    }
  }

  Json play() {
    const auto begin = std::chrono::steady_clock::now();
    check();
    const int repetitions =
        repetitions_for(session_.slowest(seconds_since(begin)), options_.repetitions);
    std::vector<LevelContender*> order;
    for (LevelContender& contender : contenders_) order.push_back(&contender);
    std::mt19937 random(1);  // the same on every rank
    for (int i = 0; i < repetitions; ++i) {
      std::shuffle(order.begin(), order.end(), random);
      for (LevelContender* const contender : order) measure(*contender);
    }
    return report(repetitions);
  }

 private:
  void enter(const std::string& name, std::function<void()> run) {
    const auto& chosen = options_.contenders;
    if (name == "loop" || std::find(chosen.begin(), chosen.end(), name) != chosen.end())
      contenders_.push_back({name, std::move(run)});
  }

  /// Runs each contender once, and compares its model with that of the loop, which is the first
  /// contender, and with those of the other ranks.
  void check() {
    constexpr double kTolerance = 0.01;  // as a part of the change of the parameters by the loop
    std::vector<at::Tensor> expected;
    for (LevelContender& contender : contenders_) {
      start_and_run(contender);
      const std::vector<at::Tensor> found = model_->values();
      if (expected.empty()) expected = found;
      const double moved = std::sqrt(squared_distance(expected, model_->initial()));
      const double error = std::sqrt(squared_distance(expected, found));
      const bool equal = error <= kTolerance * moved;
      const double size = squared_distance(found, model_->initial());
      const bool same_on_all_ranks = session_.slowest(size) == -session_.slowest(-size);
      contender.correct = session_.all(moved > 0 && same_on_all_ranks &&
                                       equal == (contender.name != "weighted-unequal"));
    }
  }

  void start_and_run(const LevelContender& contender) {
    model_->reset();
    RandomStreams(kSeed).seed_default();  // as train() does; for dropout
    session_.align();
    contender.run();
  }

  void measure(LevelContender& contender) {
    start_and_run(contender);
    std::vector<double> seconds = model_->step_seconds();
    seconds.erase(seconds.begin(), seconds.begin() + options_.lead);
    double sum = 0;
    for (const double one : seconds) sum += one;
    contender.means.push_back(session_.slowest(sum / static_cast<double>(seconds.size())));
    contender.medians.push_back(session_.slowest(percentile(seconds, 0.5)));
  }

  std::unique_ptr<torch::optim::Optimizer> make_optimizer(
      const std::vector<at::Tensor>& parameters) const {
    if (!model_->computes()) return std::make_unique<torch::optim::SGD>(parameters, kLearningRate);
    return std::make_unique<torch::optim::AdamW>(
        parameters, torch::optim::AdamWOptions(kLearningRate).weight_decay(0));
  }

  DataLoaderOptions loader_options() const {
    return {.batch_size = options_.batch_size, .seed = kSeed};
  }

  /// @param weight the argument of set_weight(); no value: it is not called
  void run_loop(std::optional<std::int64_t> weight) {
    const auto loader = hvd::loader(data_, loader_options());
    const auto inner = make_optimizer(model_->parameters());
    torch::optim::StepLR scheduler(*inner, kStepsOfConstantRate);
    DistributedOptimizer optimizer(*inner, *model_);
    optimizer.zero_grad();
    for (LevelBatch& batch : *loader) {
      const at::Tensor loss = model_->loss_of(batch);
      if (weight) optimizer.set_weight(*weight);
      loss.backward();
      if (options_.max_norm > 0) optimizer.clip_grad_norm_(options_.max_norm);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
  }

  void run_accelerator() {
    Accelerator accelerator;
    auto loader = hvd::loader(data_, loader_options());
    const auto inner = make_optimizer(model_->parameters());
    torch::optim::StepLR schedule(*inner, kStepsOfConstantRate);
    LevelModel net = model_;
    auto [model, optimizer, batches, scheduler] =
        accelerator.prepare(net, *inner, loader, schedule);
    optimizer.zero_grad();
    for (LevelBatch& batch : *batches) {
      const Accumulation step = accelerator.accumulate();
      at::Tensor loss;
      {
        const Autocast autocast = accelerator.autocast();
        loss = model->loss_of(batch);
      }
      accelerator.backward(loss);
      if (options_.max_norm > 0) accelerator.clip_grad_norm_(options_.max_norm);
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
  }

  void run_trainer() {
    const DiscardedOutput discarded;
    TrainingArguments arguments;
    arguments.output_dir = folder_.path();
    arguments.per_device_train_batch_size = options_.batch_size;
    arguments.max_steps = steps_;
    arguments.learning_rate = kLearningRate;
    arguments.optim = [this](const std::vector<at::Tensor>& parameters, const TrainingArguments&) {
      return make_optimizer(parameters);
    };
    arguments.lr_scheduler_type = SchedulerType::kConstant;
    arguments.max_grad_norm = options_.max_norm;
    arguments.save_strategy = Interval::kNo;
    arguments.logging_strategy = Interval::kNo;
    arguments.seed = kSeed;
    arguments.disable_progress = true;
    LevelTrainer trainer(model_, arguments, data_);
    trainer.train();
  }

  Json report(int repetitions) {
    const LevelContender& loop = contenders_.front();
    bool correct = true;
    Json entries = Json::object();
    for (const LevelContender& contender : contenders_) {
      correct = correct && contender.correct;
      entries[contender.name] = {
          {"correct", contender.correct},
          {"step_us", json_number(percentile(contender.means, 0.5) * 1e6)},
          {"step_us_p95", json_number(percentile(contender.means, 0.95) * 1e6)},
          {"median_step_us", json_number(percentile(contender.medians, 0.5) * 1e6)},
          {"step_over_loop", json_number(median_ratio(contender.means, loop.means))},
          {"median_step_over_loop", json_number(median_ratio(contender.medians, loop.medians))}};
    }
    return {{"set", set_name_},           {"compute", model_->computes()}, {"correct", correct},
            {"repetitions", repetitions}, {"steps", options_.steps},       {"lead", options_.lead},
            {"clip", options_.max_norm},  {"batch", options_.batch_size},  {"contenders", entries}};
  }

  static constexpr std::uint64_t kSeed = 1;
  static constexpr double kLearningRate = 1e-4;
  static constexpr unsigned kStepsOfConstantRate = 1U << 30;

  const Session& session_;
  const LevelsOptions& options_;
  const std::string set_name_;
  const int steps_;
  const RepeatedBatch data_;
  const LevelModel model_;
  const SharedFolder folder_;
  std::vector<LevelContender> contenders_;
};

void print_levels(const Json& row, std::ostream& out) {
  out << "\nstep of " << row["set"].get<std::string>()
      << (row["compute"].get<bool>() ? ", computed" : "") << ", " << row["steps"]
      << " steps in a run\n";
  Table table({"contender", "times", "step ms", "p95", "step/loop", "median step ms",
               "median step/loop", "result"});
  for (const auto& [name, entry] : row["contenders"].items()) {
    const auto milliseconds = [&entry = entry](const char* key) {
      return number_text(entry[key].is_null() ? 0 : 1e-3 * entry[key].get<double>());
    };
    const auto ratio = [&entry = entry](const char* key) {
      std::array<char, 32> text = {};  // a difference of 1 % needs three decimals
      std::snprintf(text.data(), text.size(), "%.3f",
                    entry[key].is_null() ? 0 : entry[key].get<double>());
      return std::string(text.data());
    };
    table.add({name, row["repetitions"].dump(), milliseconds("step_us"),
               milliseconds("step_us_p95"), ratio("step_over_loop"), milliseconds("median_step_us"),
               ratio("median_step_over_loop"), entry["correct"].get<bool>() ? "ok" : "WRONG"});
  }
  table.print(out);
}

}  // namespace

std::vector<std::string> level_contender_names() { return LevelsOptions().contenders; }

Json run_levels(const Session& session, const LevelsOptions& options, std::ostream& out) {
  if (torch::cuda::is_available()) {
    throw std::runtime_error(
        "levels measures on the CPU, and LibTorch has found a GPU; set CUDA_VISIBLE_DEVICES to an "
        "empty value");
  }
  share_out_threads(options.threads);
  Json result = describe_torch();
  if (session.rank() == 0) print_description(result, out);
  result["correct"] = true;
  result["rows"] = Json::array();
  for (const std::string& set : options.sets) {
    Json row = LevelsMatch(session, options, set).play();
    if (session.rank() == 0) print_levels(row, out);
    result["correct"] = result["correct"].get<bool>() && row["correct"].get<bool>();
    result["rows"].push_back(std::move(row));
  }
  return result;
}

}  // namespace hvd::bench
