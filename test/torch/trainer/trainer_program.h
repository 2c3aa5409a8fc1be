#pragma once

#include <hvd/trainer.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "torch/accelerator/accelerator_program.h"
#include "torch/checkpoint/checkpoint_job.h"

namespace hvd::testing {

/// Trains `same_net()` on Points with the mean squared error.
struct PointTrainer : Trainer<Net> {
  using Trainer::Trainer;
  torch::Tensor compute_loss(Net& model, const torch::data::Example<>& inputs) override {
    return torch::mse_loss(model->forward(inputs.data).to(torch::kFloat32), inputs.target);
  }
};

/// Arguments for a short training in `folder` without output.
inline TrainingArguments quiet(const SharedFolder& folder) {
  TrainingArguments arguments;
  arguments.output_dir = folder.path() / "out";
  arguments.per_device_train_batch_size = 4;
  arguments.num_train_epochs = 1;
  arguments.learning_rate = 1e-2;
  arguments.save_strategy = Interval::kNo;
  arguments.disable_progress = true;
  return arguments;
}

/// Writes the calls of a Trainer to a list, for example "step_end 3".
class Recorder : public TrainerCallback {
 public:
  std::vector<std::string> calls;

  void on_train_begin(const TrainingArguments&, const TrainerState& state,
                      TrainerControl&) override {
    add("train_begin", state);
  }
  void on_train_end(const TrainingArguments&, const TrainerState& state, TrainerControl&) override {
    add("train_end", state);
  }
  void on_epoch_begin(const TrainingArguments&, const TrainerState& state,
                      TrainerControl&) override {
    add("epoch_begin", state);
  }
  void on_epoch_end(const TrainingArguments&, const TrainerState& state, TrainerControl&) override {
    add("epoch_end", state);
  }
  void on_step_begin(const TrainingArguments&, const TrainerState& state,
                     TrainerControl&) override {
    add("step_begin", state);
  }
  void on_substep_end(const TrainingArguments&, const TrainerState& state,
                      TrainerControl&) override {
    add("substep_end", state);
  }
  void on_step_end(const TrainingArguments&, const TrainerState& state, TrainerControl&) override {
    add("step_end", state);
  }
  void on_evaluate(const TrainingArguments&, const TrainerState& state, TrainerControl&,
                   const Values&) override {
    add("evaluate", state);
  }
  void on_predict(const TrainingArguments&, const TrainerState& state, TrainerControl&,
                  const Values&) override {
    add("predict", state);
  }
  void on_save(const TrainingArguments&, const TrainerState& state, TrainerControl&) override {
    add("save", state);
  }
  void on_log(const TrainingArguments&, const TrainerState& state, TrainerControl&,
              const Values&) override {
    add("log", state);
  }
  /// The steps at which a function was called.
  std::vector<std::int64_t> steps_of(const std::string& function) const {
    std::vector<std::int64_t> steps;
    for (const std::string& call : calls)
      if (call.starts_with(function + ' '))
        steps.push_back(std::stoll(call.substr(function.size())));
    return steps;
  }

 private:
  void add(const char* function, const TrainerState& state) {
    calls.push_back(std::string(function) + ' ' + std::to_string(state.global_step));
  }
};

inline std::vector<torch::Tensor> values_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : module.parameters())
    values.push_back(parameter.detach().clone());
  return values;
}

inline bool same_bits(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!torch::equal(a[i], b[i])) return false;
  return true;
}

inline std::vector<std::string> lines_of(const std::filesystem::path& file) {
  std::vector<std::string> lines;
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace hvd::testing
