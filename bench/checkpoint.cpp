#include "bench/commands.h"

#include <torch/nn/modules/container/parameterlist.h>

#include <chrono>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "bench/statistics.h"
#include "bench/step_contender.h"
#include "hvd/torch/checkpointer.h"

namespace hvd::bench {
namespace {

/// A model whose parameters are updated in every step, after some computation.
class Training {
 public:
  explicit Training(const CheckpointOptions& options)
      : values_(torch::randn({256, 256})), step_seconds_(options.step_ms * 1e-3) {
    constexpr std::int64_t kTensors = 50;
    const std::int64_t elements = options.megabytes * 1'000'000 / 4 / kTensors;
    for (std::int64_t i = 0; i < kTensors; ++i) {
      parameters_->append(torch::ones({elements}));
      gradients_.push_back(torch::ones({elements}));
    }
    calibrate();
  }

  torch::nn::Module& model() { return *parameters_; }
  float value() { return parameters_[0][0].item<float>(); }

  void step() {
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < products_; ++i) values_.mm(values_);
    std::size_t next = 0;
    for (torch::Tensor& parameter : parameters_->parameters())
      parameter.add_(gradients_[next++], /*alpha=*/1);
  }

 private:
  void calibrate() {
    constexpr int kTimes = 50;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kTimes; ++i) values_.mm(values_);
    products_ = static_cast<int>(step_seconds_ / (seconds_since(begin) / kTimes));
  }

  torch::nn::ParameterList parameters_;
  std::vector<torch::Tensor> gradients_;
  torch::Tensor values_;
  double step_seconds_;
  int products_ = 0;
};

/// Compares both ways of saving, each in its own folder.
class Match {
 public:
  Match(const Session& session, const CheckpointOptions& options)
      : session_(session),
        training_(options),
        foreground_(make(options.folder / "foreground", false)),
        background_(make(options.folder / "background", true)) {}

  Json play(int rounds) {
    const double save = seconds([&] { foreground_->save(); });
    background_->save();  // allocates the memory that later saves copy into
    background_->wait();
    const double step = seconds([&] { training_.step(); });
    // The steps take long enough for a checkpoint to reach the disk meanwhile.
    const int steps = 2 + static_cast<int>(kWindow * save / step);
    for (int i = 0; i < rounds; ++i) play_round(steps);
    return {
        {"correct", correct()},
        {"steps", steps},
        {"step_ms", json_number(percentile(without_, 0.5) / steps * 1e3)},
        {"foreground_ms", json_number(percentile(in_foreground_, 0.5) * 1e3)},
        {"background_ms", json_number(percentile(in_background_, 0.5) * 1e3)},
        {"save_ms", json_number(percentile(save_, 0.5) * 1e3)},
        {"background_over_foreground", json_number(median_ratio(in_background_, in_foreground_))}};
  }

 private:
  static constexpr double kWindow = 3;  // in units of the duration of a foreground checkpoint

  std::unique_ptr<Checkpointer> make(const std::filesystem::path& folder, bool background) {
    TrainingState state;
    state.model(training_.model());
    return std::make_unique<Checkpointer>(folder, state,
                                          CheckpointerOptions{.keep = 1, .background = background});
  }

  void play_round(int steps) {
    const auto train = [&] {
      for (int i = 0; i < steps; ++i) training_.step();
    };
    const double without = seconds(train);
    without_.push_back(without);
    in_foreground_.push_back(seconds([&] {
                               foreground_->save();
                               train();
                             }) -
                             without);
    in_background_.push_back(seconds([&] {
                               saved_ = training_.value();
                               const auto begin = std::chrono::steady_clock::now();
                               background_->save();
                               save_.push_back(seconds_since(begin));
                               train();
                               background_->wait();
                             }) -
                             without);
  }

  template <class Run>
  double seconds(const Run& run) {
    session_.align();
    const auto begin = std::chrono::steady_clock::now();
    run();
    return session_.slowest(seconds_since(begin));
  }

  /// Whether the files have the state at the time of the save, and not the state at the time of
  /// writing.
  bool correct() {
    const bool changed = training_.value() != saved_;
    background_->load();
    return session_.all(changed && training_.value() == saved_);
  }

  const Session& session_;
  Training training_;
  std::unique_ptr<Checkpointer> foreground_, background_;
  std::vector<double> without_, in_foreground_, in_background_;
  std::vector<double> save_;  ///< duration of save() itself in the background
  float saved_ = 0;
};

}  // namespace

Json run_checkpoint(const Session& session, const CheckpointOptions& options, std::ostream& out) {
  share_out_threads(options.threads);
  const std::filesystem::path folder = options.folder / "hvd-bench-checkpoint";
  CheckpointOptions own = options;
  own.folder = folder;
  Json result = Match(session, own).play(options.rounds);
  session.align_asleep();
  if (session.rank() == 0) {
    std::filesystem::remove_all(folder);
    const auto number = [&](const char* key) {
      return number_text(result[key].is_null() ? 0 : result[key].get<double>());
    };
    Table table({"state MB", "step ms", "foreground ms", "background ms", "of it save() ms",
                 "ratio", "result"});
    table.add({std::to_string(options.megabytes), number("step_ms"), number("foreground_ms"),
               number("background_ms"), number("save_ms"), number("background_over_foreground"),
               result["correct"].get<bool>() ? "ok" : "WRONG"});
    out << "the time that a checkpoint adds to the steps\n";
    table.print(out);
  }
  return result;
}

}  // namespace hvd::bench
