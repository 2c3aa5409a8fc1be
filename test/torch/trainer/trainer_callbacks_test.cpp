#include <memory>

#include "torch/trainer/trainer_program.h"

// Callbacks, the intervals of evaluations, checkpoints and logs, and early stopping.

namespace hvd::testing {
namespace {

using Steps = std::vector<std::int64_t>;

/// A data set of which an epoch has `batches` batches of 4 samples on each rank.
auto epoch_of(std::size_t batches) {
  return points(4 * batches * static_cast<std::size_t>(size()));
}

TEST(TrainerCallbacks, AreCalledInOrder) {
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.gradient_accumulation_steps = 2;
  arguments.eval_strategy = Interval::kEpoch;
  arguments.save_strategy = Interval::kEpoch;
  arguments.logging_steps = 1;
  auto first = std::make_shared<Recorder>(), second = std::make_shared<Recorder>();
  PointTrainer trainer(same_net(), arguments, epoch_of(3), epoch_of(1));
  trainer.add_callback(first);
  trainer.add_callback(second);
  trainer.train();
  const std::vector<std::string> expected{
      "train_begin 0", "epoch_begin 0", "step_begin 0", "substep_end 0", "step_end 1",
      "log 1",         "step_begin 1",  "step_end 2",   "log 2",         "epoch_end 2",
      "log 2",         "evaluate 2",    "save 2",       "log 2",         "train_end 2"};
  EXPECT_EQ(first->calls, expected);
  EXPECT_EQ(second->calls, expected);
}

TEST(TrainerCallbacks, IntervalsAreKept) {
  struct Case {
    Interval interval;
    Steps evaluations, checkpoints, losses;
  };
  const Case cases[] = {{Interval::kNo, {}, {}, {}},
                        {Interval::kSteps, {2, 4, 6}, {4, 6}, {3, 6}},
                        {Interval::kEpoch, {3, 6}, {3, 6}, {3, 6}}};
  for (const Case& expected : cases) {
    const SharedFolder folder;
    TrainingArguments arguments = quiet(folder);
    arguments.num_train_epochs = 2;
    arguments.eval_strategy = arguments.save_strategy = arguments.logging_strategy =
        expected.interval;
    arguments.eval_steps = 2;
    arguments.save_steps = 4;
    arguments.logging_steps = 3;
    auto recorder = std::make_shared<Recorder>();
    PointTrainer trainer(same_net(), arguments, epoch_of(3), epoch_of(1));
    trainer.add_callback(recorder);
    trainer.train();
    EXPECT_EQ(recorder->steps_of("evaluate"), expected.evaluations);
    EXPECT_EQ(recorder->steps_of("save"), expected.checkpoints);
    Steps losses;
    for (const auto& entry : trainer.state().log_history)
      if (entry.contains("loss")) losses.push_back(static_cast<std::int64_t>(entry.at("step")));
    EXPECT_EQ(losses, expected.losses);
    for (const std::int64_t step : expected.checkpoints)
      EXPECT_TRUE(exists(folder.path() / "out" / ("checkpoint-" + std::to_string(step))));
  }
}

/// Makes requests on the last rank only.
class LastRankRequests final : public TrainerCallback {
 public:
  void on_step_end(const TrainingArguments&, const TrainerState& state,
                   TrainerControl& control) override {
    if (rank() != size() - 1) return;
    if (state.global_step == 1) control.should_log = true;
    if (state.global_step == 2) control.should_evaluate = control.should_save = true;
    if (state.global_step == 3) control.should_epoch_stop = true;
    if (state.global_step == 5) control.should_training_stop = true;
  }
};

TEST(TrainerCallbacks, ARequestOfOneRankIsFollowedByAll) {
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.num_train_epochs = 4;
  auto recorder = std::make_shared<Recorder>();
  PointTrainer trainer(same_net(), arguments, epoch_of(4), epoch_of(1));
  trainer.add_callback(LastRankRequests());
  trainer.add_callback(recorder);
  EXPECT_EQ(trainer.train().global_step, 5);
  EXPECT_EQ(recorder->steps_of("log"), (Steps{1, 2, 5}));
  EXPECT_EQ(recorder->steps_of("evaluate"), Steps{2});
  EXPECT_EQ(recorder->steps_of("save"), Steps{2});
  EXPECT_EQ(recorder->steps_of("epoch_end"), (Steps{3, 5}));
  EXPECT_EQ(trainer.state().epoch, 1.5);
}

/// Trains with an evaluation in each step whose metric "score" is scripted.
/// @return the trainer's state, and the model's parameters after each step
struct Scripted {
  TrainerState state;
  std::vector<std::vector<torch::Tensor>> after_step;
  std::vector<torch::Tensor> at_end;
};
Scripted run_scripted(const SharedFolder& folder, const std::vector<double>& scores,
                      const EarlyStopping& stopping, bool greater) {
  struct Snapshots final : TrainerCallback {
    explicit Snapshots(Net model, Scripted& result) : net(std::move(model)), out(result) {}
    void on_step_end(const TrainingArguments&, const TrainerState&, TrainerControl&) override {
      out.after_step.push_back(values_of(*net));
    }
    Net net;
    Scripted& out;
  };
  TrainingArguments arguments = quiet(folder);
  arguments.max_steps = static_cast<std::int64_t>(scores.size());
  arguments.eval_strategy = arguments.save_strategy = Interval::kSteps;
  arguments.eval_steps = arguments.save_steps = 1;
  arguments.save_total_limit = 1;
  arguments.load_best_model_at_end = true;
  arguments.metric_for_best_model = "score";
  arguments.greater_is_better = greater;
  std::size_t evaluations = 0;
  Net net = same_net();
  PointTrainer trainer(net, arguments, epoch_of(2), epoch_of(1), [&](const EvalPrediction&) {
    return std::map<std::string, double>{{"score", scores[evaluations++]}};
  });
  Scripted result;
  trainer.add_callback(std::make_shared<Snapshots>(net, result));
  trainer.add_callback(stopping);
  trainer.train();
  result.state = trainer.state();
  result.at_end = values_of(*net);
  return result;
}

TEST(TrainerCallbacks, EarlyStoppingWaitsForItsPatienceAndTheBestModelIsLoaded) {
  const SharedFolder folder;
  const Scripted run = run_scripted(folder, {1, 3, 2, 2.5, 9, 9}, EarlyStopping(2), true);
  EXPECT_EQ(run.state.global_step, 4);
  EXPECT_EQ(run.state.best_metric, 3);
  EXPECT_EQ(run.state.best_global_step, 2);
  EXPECT_EQ(run.state.best_model_checkpoint, folder.path() / "out/checkpoint-2");
  EXPECT_TRUE(same_bits(run.at_end, run.after_step.at(1)));
  // The best checkpoint remains besides the newest one.
  EXPECT_TRUE(exists(folder.path() / "out/checkpoint-2"));
  EXPECT_FALSE(exists(folder.path() / "out/checkpoint-3"));
  EXPECT_TRUE(exists(folder.path() / "out/checkpoint-4"));
}

TEST(TrainerCallbacks, EarlyStoppingCountsImprovementsAboveTheThreshold) {
  const SharedFolder folder;
  // Smaller is better: 0.95 is better than 1, but by less than the threshold.
  const Scripted run =
      run_scripted(folder, {1, 0.5, 0.45, 0.2, 0.15, 0.1}, EarlyStopping(2, 0.1), false);
  EXPECT_EQ(run.state.global_step, 6);
  EXPECT_EQ(run.state.best_metric, 0.1);
  EXPECT_THROW(EarlyStopping(0), UsageError);
  EXPECT_THROW(EarlyStopping(1, -1), UsageError);
}

}  // namespace
}  // namespace hvd::testing
