#include <memory>

#include "torch/trainer/trainer_program.h"

// Bad input is an error on every rank that names the argument, its value and what to do.

namespace hvd::testing {
namespace {

/// The text of a UsageError or MismatchError.
std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const UsageError& error) {
    return error.what();
  } catch (const MismatchError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an error";
  return {};
}

struct BadArguments {
  std::function<void(TrainingArguments&)> change;
  std::vector<std::string> parts;
};

TEST(TrainerErrors, NameTheArgumentItsValueAndWhatToDo) {
  const SharedFolder folder;
  const BadArguments cases[] = {
      {[](TrainingArguments& a) { a.per_device_train_batch_size = 0; },
       {"per_device_train_batch_size is 0", "expected at least 1"}},
      {[](TrainingArguments& a) { a.ddp_timeout = std::chrono::seconds(0); },
       {"ddp_timeout is 0", "expected at least 1"}},
      {[](TrainingArguments& a) { a.fp16 = a.bf16 = true; }, {"fp16 and bf16", "set one of them"}},
      {[](TrainingArguments& a) { a.eval_strategy = Interval::kEpoch; },
       {"eval_strategy is epoch", "there is no evaluation set; pass one"}},
      {[](TrainingArguments& a) { a.metric_for_best_model = "f1"; },
       {"metric_for_best_model is 'f1'", "pass compute_metrics"}},
      {[](TrainingArguments& a) {
         a.dataloader_drop_last = true;
         a.per_device_train_batch_size = 1000;
       },
       {"dataloader_drop_last is true", "the 16 samples", "smaller per_device_train_batch_size"}},
  };
  for (const BadArguments& bad : cases) {
    TrainingArguments arguments = quiet(folder);
    bad.change(arguments);
    const std::string text =
        error_of([&] { PointTrainer trainer(same_net(), arguments, points(16)); });
    for (const std::string& part : bad.parts) EXPECT_TRUE(contains(text, part)) << text;
  }
}

TEST(TrainerErrors, ADifferenceBetweenRanksNamesArgumentAndValues) {
  if (size() == 1) return;
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.learning_rate = rank() == 1 ? 0.5 : 0.25;
  std::string text = error_of([&] { PointTrainer trainer(same_net(), arguments, points(16)); });
  EXPECT_TRUE(contains(text, "learning_rate") && contains(text, "0.5") && contains(text, "0.25"))
      << text;
  // An error of one rank is an error on all.
  arguments.learning_rate = rank() == 1 ? -1 : 0.25;
  text = error_of([&] { PointTrainer trainer(same_net(), arguments, points(16)); });
  EXPECT_TRUE(contains(text, "learning_rate is -1")) << text;
  arguments.learning_rate = 0.25;
  text = error_of([&] {
    PointTrainer trainer(same_net(), arguments, points(static_cast<std::size_t>(16 + rank())));
  });
  EXPECT_TRUE(contains(text, "training set") && contains(text, "17 samples")) << text;
}

TEST(TrainerErrors, DataSetsModelsAndResults) {
  const SharedFolder folder;
  const TrainingArguments arguments = quiet(folder);
  EXPECT_TRUE(contains(error_of([&] { PointTrainer trainer(Net(nullptr), arguments, points(16)); }),
                       "the model is empty"));
  if (size() > 1) {
    const std::string text =
        error_of([&] { PointTrainer trainer(same_net(), arguments, points(16), points(1)); });
    EXPECT_TRUE(contains(text, "evaluation set has 1 samples") && contains(text, "ranks")) << text;
    PointTrainer trainer(same_net(), arguments, points(16));
    EXPECT_TRUE(contains(error_of([&] { trainer.predict(points(1)); }), "has 1 samples"));
  }
  PointTrainer trainer(same_net(), arguments);
  EXPECT_TRUE(contains(error_of([&] { trainer.train(); }), "there is no training set"));
  EXPECT_TRUE(contains(error_of([&] { trainer.evaluate(); }), "there is no evaluation set"));
  EXPECT_TRUE(contains(error_of([&] { trainer.add_callback(std::shared_ptr<TrainerCallback>()); }),
                       "the callback is null"));

  struct WrongLoss : Trainer<Net> {
    using Trainer::Trainer;
    torch::Tensor compute_loss(Net& model, const torch::data::Example<>& inputs) override {
      return model->forward(inputs.data);
    }
  };
  WrongLoss wrong(same_net(), arguments, points(16));
  EXPECT_TRUE(contains(error_of([&] { wrong.train(); }), "a tensor of shape [4, 2]"));

  Net frozen = same_net();
  for (torch::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  PointTrainer still(frozen, arguments, points(16));
  EXPECT_TRUE(contains(error_of([&] { still.train(); }), "no parameter that requires grad"));

  TrainingArguments null = arguments;
  null.optim = [](const std::vector<torch::Tensor>&,
                  const TrainingArguments&) -> std::unique_ptr<torch::optim::Optimizer> {
    return nullptr;
  };
  PointTrainer without(same_net(), null, points(16));
  EXPECT_TRUE(contains(error_of([&] { without.train(); }), "optim has returned null"));
}

TEST(TrainerErrors, AMetricThatComputeMetricsDoesNotGive) {
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.eval_strategy = Interval::kEpoch;
  arguments.metric_for_best_model = "f1";
  PointTrainer trainer(same_net(), arguments, points(16), points(16), [](const EvalPrediction&) {
    return std::map<std::string, double>{{"accuracy", 1}};
  });
  const std::string text = error_of([&] { trainer.train(); });
  EXPECT_TRUE(contains(text, "metric_for_best_model is 'f1'")) << text;
  EXPECT_TRUE(contains(text, "expected one of epoch, eval_accuracy, eval_loss")) << text;
  trainer.add_callback(EarlyStopping());
  EXPECT_TRUE(contains(error_of([&] { trainer.train(); }), "EarlyStopping"));
  PointTrainer no_evaluation(same_net(), quiet(folder), points(16));
  no_evaluation.add_callback(EarlyStopping());
  EXPECT_TRUE(contains(error_of([&] { no_evaluation.train(); }), "eval_strategy is no"));
}

TEST(TrainerErrors, OutputDirAndResume) {
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  const auto train = [&](const ResumeFrom& from) {
    PointTrainer trainer(same_net(), arguments, points(16));
    trainer.train(from);
  };
  EXPECT_TRUE(contains(error_of([&] { train(true); }), "has no complete checkpoint"));
  EXPECT_TRUE(contains(error_of([&] { train(folder.path() / "none"); }),
                       "which is not a complete checkpoint"));
  EXPECT_EQ(get_last_checkpoint(arguments.output_dir), std::nullopt);
  arguments.save_strategy = Interval::kEpoch;
  train({});
  arguments.learning_rate = 0.5;
  const std::string text = error_of([&] { train({}); });
  EXPECT_TRUE(contains(text, "has checkpoints of another run")) << text;
  EXPECT_TRUE(contains(text, "learning_rate 0.01, and this run has 0.5")) << text;
  EXPECT_TRUE(contains(text, "call train(true) to continue it, or use another output_dir")) << text;
  train(true);  // continues with the new arguments
  if (rank() == 0) std::ofstream(folder.path() / "file") << "a file";
  arguments.output_dir = folder.path() / "file";
  EXPECT_TRUE(contains(error_of([&] { train({}); }), "Trainer::train"));
  // A checkpoint of Python's Trainer would be removed.
  arguments.output_dir = folder.path() / "python";
  const auto foreign = folder.path() / "python" / "checkpoint-1" / "optimizer.pt";
  if (rank() == 0) {
    std::filesystem::create_directories(foreign.parent_path());
    std::ofstream(foreign) << "state";
  }
  EXPECT_TRUE(
      contains(error_of([&] { train({}); }), "checkpoint-1, which is not a checkpoint of hvd"));
  barrier();
  EXPECT_TRUE(std::filesystem::exists(foreign));
}

/// Drops the first dimension of a batch of one sample.
struct Squeezing : PointTrainer {
  using PointTrainer::PointTrainer;
  PredictionStep prediction_step(Net& model, const torch::data::Example<>& inputs, bool) override {
    return {.loss = compute_loss(model, inputs),
            .predictions = model->forward(inputs.data).select(1, 0).squeeze()};
  }
};

TEST(TrainerErrors, MissingRowsOnOneRankAreAnErrorOnAll) {
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.per_device_eval_batch_size = 4;
  Squeezing trainer(same_net(), arguments);
  // Rank 0 has a last batch of one sample.
  const auto samples = static_cast<std::size_t>(4 * size() + 1);
  const std::string text = error_of([&] { trainer.predict(points(samples)); });
  EXPECT_TRUE(contains(text, "predictions with 0 rows for a batch of 1 samples")) << text;
}

}  // namespace
}  // namespace hvd::testing
