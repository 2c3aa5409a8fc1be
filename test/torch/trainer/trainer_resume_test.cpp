#include <memory>

#include "torch/trainer/trainer_program.h"

// Checkpoints: a resumed run is the run that was not interrupted.

namespace hvd::testing {
namespace {

namespace fs = std::filesystem;

/// A network with dropout, whose random numbers a checkpoint contains.
struct DropNetImpl : torch::nn::Module {
  torch::nn::Linear in = register_module("in", torch::nn::Linear(4, 8));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.5));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(8, 2));
  torch::Tensor forward(torch::Tensor x) { return out(dropout(torch::tanh(in(x)))); }
};
TORCH_MODULE(DropNet);

struct DropTrainer : Trainer<DropNet> {
  using Trainer::Trainer;
  torch::Tensor compute_loss(DropNet& model, const torch::data::Example<>& inputs) override {
    return torch::mse_loss(model->forward(inputs.data).to(torch::kFloat32), inputs.target);
  }
};

struct Outcome {
  TrainerState state;
  std::vector<torch::Tensor> parameters;
  double training_loss = 0;
};

Outcome train(const TrainingArguments& arguments, const ResumeFrom& from) {
  torch::manual_seed(from.newest() ? 5 : 4);  // a resumed run does not depend on it
  DropNet net;
  DropTrainer trainer(net, arguments, points(41), points(9));
  trainer.add_callback(EarlyStopping(100));
  Outcome outcome;
  outcome.training_loss = trainer.train(from).training_loss;
  outcome.state = trainer.state();
  outcome.parameters = values_of(*net);
  barrier();  // rank 0 has written its files
  return outcome;
}

/// The log without times.
std::vector<std::map<std::string, double>> history_of(const TrainerState& state) {
  std::vector<std::map<std::string, double>> history;
  for (auto entry : state.log_history) {
    std::erase_if(entry, [](const auto& item) {
      return item.first.find("_per_") != std::string::npos ||
             item.first.find("runtime") != std::string::npos;
    });
    history.push_back(std::move(entry));
  }
  return history;
}

std::vector<std::string> log_lines(const fs::path& output_dir) {
  std::vector<std::string> lines = lines_of(output_dir / "log.csv");
  std::erase_if(lines, [](const std::string& line) {
    return contains(line, "_per_") || contains(line, "runtime");
  });
  return lines;
}

void expect_resumes_repeat(TrainingArguments arguments, const SharedFolder& folder) {
  const fs::path whole_dir = folder.path() / "whole", cut_dir = folder.path() / "cut";
  arguments.output_dir = whole_dir;
  const Outcome whole = train(arguments, {});
  arguments.output_dir = cut_dir;
  for (std::int64_t step = 1; step <= whole.state.global_step; step += 2) {
    if (rank() == 0) {
      fs::remove_all(cut_dir);
      fs::copy(whole_dir, cut_dir, fs::copy_options::recursive);
      for (std::int64_t later = step + 1; later <= whole.state.global_step; ++later)
        fs::remove_all(cut_dir / ("checkpoint-" + std::to_string(later)));
      // Left by a process that was killed while it saved.
      fs::create_directories(cut_dir / "checkpoint-1000/step-000000001000");
    }
    barrier();
    const Outcome resumed = train(arguments, true);
    EXPECT_TRUE(same_bits(resumed.parameters, whole.parameters)) << "after step " << step;
    EXPECT_EQ(resumed.training_loss, whole.training_loss);
    EXPECT_EQ(history_of(resumed.state), history_of(whole.state)) << "after step " << step;
    EXPECT_EQ(resumed.state.best_metric, whole.state.best_metric);
    EXPECT_EQ(log_lines(cut_dir), log_lines(whole_dir)) << "after step " << step;
    EXPECT_EQ(fs::exists(cut_dir / "checkpoint-1000"), step == whole.state.global_step);
    barrier();
  }
}

TrainingArguments saving_each_step(const SharedFolder& folder) {
  TrainingArguments arguments = quiet(folder);
  arguments.num_train_epochs = 2;
  arguments.save_strategy = Interval::kSteps;
  arguments.save_steps = 1;
  arguments.logging_steps = 2;
  arguments.eval_strategy = Interval::kSteps;
  arguments.eval_steps = 3;
  arguments.report_to = {"csv"};
  return arguments;
}

TEST(TrainerResume, RepeatsTheRunWithWorkersAndAccumulation) {
  const SharedFolder folder;
  TrainingArguments arguments = saving_each_step(folder);
  arguments.gradient_accumulation_steps = 2;
  arguments.dataloader_num_workers = 2;
  arguments.warmup_steps = 2;
  expect_resumes_repeat(arguments, folder);
}

TEST(TrainerResume, RepeatsTheRunWithAShardedOptimizer) {
  const SharedFolder folder;
  TrainingArguments arguments = saving_each_step(folder);
  arguments.optim = OptimizerType::kAdamWSharded;
  arguments.num_train_epochs = 1;
  arguments.eval_strategy = Interval::kEpoch;
  arguments.logging_strategy = Interval::kEpoch;
  expect_resumes_repeat(arguments, folder);
}

TEST(TrainerResume, RepeatsTheRunInFloat16) {
  const SharedFolder folder;
  TrainingArguments arguments = saving_each_step(folder);
  arguments.fp16 = true;
  arguments.gradient_accumulation_steps = 3;
  arguments.lr_scheduler_type = SchedulerType::kCosine;
  expect_resumes_repeat(arguments, folder);
}

TEST(TrainerResume, AFolderMayBeNamedAndMoreEpochsContinue) {
  const SharedFolder folder;
  TrainingArguments arguments = saving_each_step(folder);
  arguments.lr_scheduler_type = SchedulerType::kConstant;  // does not depend on the length
  arguments.save_total_limit = 3;
  const Outcome whole = train(arguments, {});
  const auto last = get_last_checkpoint(arguments.output_dir);
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->filename(), "checkpoint-" + std::to_string(whole.state.global_step));
  EXPECT_FALSE(fs::exists(folder.path() / "out/checkpoint-1"));
  EXPECT_TRUE(fs::exists(*last / "model.safetensors"));
  EXPECT_TRUE(fs::exists(*last / "trainer_state.json"));
  barrier();

  TrainingArguments half = saving_each_step(folder);
  half.lr_scheduler_type = SchedulerType::kConstant;
  half.output_dir = folder.path() / "half";
  half.num_train_epochs = 1;
  train(half, {});
  const fs::path middle = *get_last_checkpoint(half.output_dir);
  half.output_dir = arguments.output_dir;
  half.num_train_epochs = 2;
  const Outcome continued = train(half, middle);
  EXPECT_TRUE(same_bits(continued.parameters, whole.parameters));
}

TEST(TrainerResume, ANewRunReplacesTheCheckpointsOfAnEqualOne) {
  const SharedFolder folder;
  TrainingArguments arguments = saving_each_step(folder);
  arguments.save_steps = 4;
  const Outcome first = train(arguments, {});
  const std::size_t lines = log_lines(arguments.output_dir).size();
  barrier();
  const Outcome second = train(arguments, {});
  EXPECT_TRUE(same_bits(first.parameters, second.parameters));
  EXPECT_EQ(log_lines(arguments.output_dir).size(), lines);
}

TEST(TrainerResume, ACallbackKeepsItsOwnState) {
  struct Counter final : TrainerCallback {
    void on_step_end(const TrainingArguments&, const TrainerState&, TrainerControl&) override {
      ++count;
    }
    void add_state(TrainingState& state, const std::string& name) override {
      state.value(name + ".count", count);
    }
    std::int64_t count = 0;
  };
  const SharedFolder folder;
  TrainingArguments arguments = saving_each_step(folder);
  for (int run = 0; run < 2; ++run) {
    auto counter = std::make_shared<Counter>();
    DropTrainer trainer(DropNet(), arguments, points(41), points(9));
    trainer.add_callback(counter);
    const ResumeFrom from = run == 0 ? ResumeFrom() : ResumeFrom(true);
    EXPECT_EQ(trainer.train(from).global_step, counter->count);
    barrier();
    if (rank() == 0) fs::remove_all(*get_last_checkpoint(arguments.output_dir));
    barrier();
  }
}

}  // namespace
}  // namespace hvd::testing
