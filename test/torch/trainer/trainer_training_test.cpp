#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>

#include "torch/trainer/trainer_program.h"

// The training loop and evaluations, compared with loops that are written by hand and with Python.

namespace hvd::testing {
namespace {

constexpr std::size_t kSamples = 44;  // the last batch of an epoch is smaller

std::vector<torch::Tensor> samples_at(const std::vector<std::size_t>& indices) {
  Points set(kSamples);
  std::vector<torch::Tensor> data, targets;
  for (const std::size_t index : indices) {
    const auto example = set.get(index);
    data.push_back(example.data);
    targets.push_back(example.target);
  }
  return {torch::stack(data), torch::stack(targets)};
}

/// Trains on the joined batches of all ranks, in one process.
std::vector<torch::Tensor> trained_by_hand(const TrainingArguments& arguments,
                                           std::int64_t epochs) {
  Net net = same_net();
  std::vector<torch::Tensor> matrices, vectors;
  for (const torch::Tensor& parameter : net->parameters())
    (parameter.dim() < 2 ? vectors : matrices).push_back(parameter);
  const auto options = [&](double decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(arguments.learning_rate).weight_decay(decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, options(arguments.weight_decay));
  groups.emplace_back(vectors, options(0));
  torch::optim::AdamW adamw(groups);
  const auto ranks = static_cast<std::size_t>(size());
  // Samples are repeated so that all ranks have equally many.
  const std::size_t padded = (kSamples + ranks - 1) / ranks * ranks;
  const std::size_t batch = 4 * ranks;
  const std::int64_t batches = static_cast<std::int64_t>((padded + batch - 1) / batch);
  const std::int64_t in_step = arguments.gradient_accumulation_steps;
  const std::int64_t total = epochs * ((batches + in_step - 1) / in_step);
  std::int64_t step = 0;
  for (std::int64_t epoch = 0; epoch < epochs; ++epoch) {
    libtorch::LoaderProgress progress(kSamples, {.seed = arguments.seed}, 0, 1);
    progress.set_epoch(static_cast<std::size_t>(epoch));
    std::vector<std::size_t> order = progress.samples();
    for (std::size_t i = kSamples; i < padded; ++i) order.push_back(order[i - kSamples]);
    for (std::int64_t first = 0; first < batches; first += in_step) {
      const std::int64_t last = std::min(first + in_step, batches);
      for (std::int64_t b = first; b < last; ++b) {
        const auto begin =
            order.begin() + static_cast<std::ptrdiff_t>(b * static_cast<std::int64_t>(batch));
        const auto left = static_cast<std::size_t>(order.end() - begin);
        const auto sample =
            samples_at({begin, begin + static_cast<std::ptrdiff_t>(std::min(batch, left))});
        (torch::mse_loss(net->forward(sample[0]), sample[1]) / (last - first)).backward();
      }
      torch::nn::utils::clip_grad_norm_(net->parameters(), arguments.max_grad_norm);
      for (auto& group : adamw.param_groups())
        group.options().set_lr(arguments.learning_rate * static_cast<double>(total - step) /
                               static_cast<double>(total));
      adamw.step();
      adamw.zero_grad();
      ++step;
    }
  }
  return values_of(*net);
}

TEST(Trainer, TrainsLikeALoopByHandOnTheJoinedBatches) {
  for (const std::int64_t accumulated : {1, 4}) {
    const SharedFolder folder;
    TrainingArguments arguments = quiet(folder);
    arguments.num_train_epochs = 2;
    arguments.gradient_accumulation_steps = accumulated;
    arguments.weight_decay = 0.1;
    arguments.max_grad_norm = 0.5;
    arguments.dataloader_num_workers = accumulated == 1 ? 0 : 2;
    Net net = same_net();
    PointTrainer trainer(net, arguments, points(kSamples));
    const TrainOutput output = trainer.train();
    const auto expected = trained_by_hand(arguments, 2);
    const auto trained = values_of(*net);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(near(trained[i], expected[i], 1e-5)) << i;
    EXPECT_TRUE(same_on_all_ranks(trained));
    EXPECT_EQ(output.global_step, trainer.state().max_steps);
    EXPECT_EQ(trainer.state().epoch, 2);
    EXPECT_GT(output.training_loss, 0);
    EXPECT_GT(output.metrics.at("train_samples_per_second"), 0);
  }
}

/// The log of the same training by Trainer of transformers 5.24.0 with PyTorch 2.13.0, in one
/// process with batches of 24 samples and optim="adamw_torch". Its sampler returns the order of
/// PyTorch's DistributedSampler with seed 42. The second step of an epoch has one batch of 12.
TEST(Trainer, LogsAndTrainsAsThatOfTransformers) {
  const std::vector<std::map<std::string, double>> expected = {
      {{"loss", 8.50859261}, {"grad_norm", 12.8019476}, {"learning_rate", 0}, {"epoch", 0.75}},
      {{"loss", 12.4305277}, {"grad_norm", 17.2321053}, {"learning_rate", 0.05}, {"epoch", 1}},
      {{"loss", 5.96481323}, {"grad_norm", 9.97046185}, {"learning_rate", 0.1}, {"epoch", 1.75}},
      {{"loss", 1.49746883}, {"grad_norm", 3.83118725}, {"learning_rate", 0.2 / 3}, {"epoch", 2}},
      {{"loss", 0.94741714}, {"grad_norm", 2.1500988}, {"learning_rate", 0.1 / 3}, {"epoch", 2.75}},
  };
  const std::vector<double> squares = {11.568462,  4.2724188, 5.2829254,  // fc1, fc2, norm
                                       0.44470408, 3.6849048, 1.9047233};
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.per_device_train_batch_size = 24 / size();
  arguments.gradient_accumulation_steps = 3;
  arguments.num_train_epochs = 2.5;
  arguments.learning_rate = 0.1;
  arguments.weight_decay = 0.5;
  arguments.warmup_steps = 2;
  arguments.logging_steps = 1;
  Net net;
  {
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : net->parameters())
      parameter.copy_(torch::arange(parameter.numel(), torch::kFloat32).sin().view_as(parameter));
  }
  PointTrainer trainer(net, arguments, points(84));
  const TrainOutput output = trainer.train();
  EXPECT_EQ(output.global_step, 5);
  EXPECT_EQ(trainer.state().num_train_epochs, 3);
  EXPECT_NEAR(output.training_loss, 5.869763898849487, 1e-5);
  ASSERT_GE(trainer.state().log_history.size(), expected.size());
  for (std::size_t step = 0; step < expected.size(); ++step)
    for (const auto& [name, value] : expected[step])
      EXPECT_NEAR(trainer.state().log_history[step].at(name), value, 1e-5 * (1 + value))
          << name << " of step " << step + 1;
  const auto parameters = net->named_parameters();
  for (std::size_t i = 0; i < squares.size(); ++i) {
    const torch::Tensor& parameter = parameters[i].value();
    EXPECT_NEAR(parameter.square().sum().item<double>(), squares[i], 1e-4) << parameters[i].key();
  }
}

TEST(Trainer, EveryOptimizerAndPrecisionLearns) {
  const auto train = [](const auto& change) {
    const SharedFolder folder;
    TrainingArguments arguments = quiet(folder);
    arguments.num_train_epochs = 8;
    change(arguments);
    Net net = same_net();
    PointTrainer trainer(net, arguments, points(64), points(64));
    const double before = trainer.evaluate().at("eval_loss");
    trainer.train();
    EXPECT_LT(trainer.evaluate().at("eval_loss"), 0.9 * before);
    return values_of(*net);
  };
  const auto adamw = train([](TrainingArguments&) {});
  const auto sharded =
      train([](TrainingArguments& arguments) { arguments.optim = OptimizerType::kAdamWSharded; });
  for (std::size_t i = 0; i < adamw.size(); ++i) EXPECT_TRUE(near(sharded[i], adamw[i], 1e-5)) << i;
  const auto sgd = train([](TrainingArguments& arguments) {
    arguments.optim = OptimizerType::kSgd;
    arguments.learning_rate = 0.1;
  });
  const auto own = train([](TrainingArguments& arguments) {
    arguments.learning_rate = 0.1;
    arguments.optim = [](const std::vector<torch::Tensor>& parameters,
                         const TrainingArguments& all) {
      return std::make_unique<torch::optim::SGD>(parameters, all.learning_rate);
    };
  });
  for (std::size_t i = 0; i < sgd.size(); ++i) EXPECT_TRUE(near(own[i], sgd[i], 1e-5)) << i;
  train([](TrainingArguments& arguments) { arguments.bf16 = true; });
  train([](TrainingArguments& arguments) { arguments.fp16 = true; });
}

TEST(Trainer, TheModelMayBeASharedPointerAndAStepMayEndTheTraining) {
  struct SharedTrainer : Trainer<std::shared_ptr<NetImpl>> {
    using Trainer::Trainer;
    torch::Tensor compute_loss(std::shared_ptr<NetImpl>& model,
                               const torch::data::Example<>& inputs) override {
      return torch::mse_loss(model->forward(inputs.data), inputs.target);
    }
  };
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.max_steps = 3;
  SharedTrainer trainer(same_net().ptr(), arguments, Points(8 * static_cast<std::size_t>(size())));
  EXPECT_EQ(trainer.train().global_step, 3);
  EXPECT_EQ(trainer.state().epoch, 1.5);
  EXPECT_EQ(trainer.state().num_train_epochs, 2);
  // A second training starts again, with the present parameters.
  EXPECT_EQ(trainer.train().global_step, 3);
}

TEST(TrainerEvaluation, TheLossIsTheMeanOverAllSamplesOfAllRanks) {
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.per_device_eval_batch_size = 3;
  Net net = same_net();
  PointTrainer trainer(net, arguments, points(kSamples), points(kSamples - 1));
  std::vector<std::size_t> all(kSamples - 1);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  const auto samples = samples_at(all);
  const torch::NoGradGuard no_grad;
  const double expected = torch::mse_loss(net->forward(samples[0]), samples[1]).item<double>();
  for (int repeated = 0; repeated < 2; ++repeated) {
    const auto metrics = trainer.evaluate();
    EXPECT_NEAR(metrics.at("eval_loss"), expected, 1e-6);
    EXPECT_GT(metrics.at("eval_runtime"), 0);
    EXPECT_GT(metrics.at("eval_samples_per_second"), 0);
    EXPECT_GT(metrics.at("eval_steps_per_second"), 0);
  }
  EXPECT_NEAR(trainer.evaluate(points(kSamples - 1), "other").at("other_loss"), expected, 1e-6);
  EXPECT_TRUE(net->is_training());
}

/// Predicts the numbers themselves, in two rows per sample.
struct NumberTrainer : Trainer<Net, torch::Tensor> {
  using Trainer::Trainer;
  torch::Tensor compute_loss(Net&, const torch::Tensor& inputs) override {
    return inputs.to(torch::kFloat32).mean();
  }
  PredictionStep prediction_step(Net&, const torch::Tensor& inputs, bool loss_only) override {
    if (loss_only) return {.loss = inputs.to(torch::kFloat32).mean()};
    return {.predictions = torch::stack({inputs, -inputs}, 1).flatten(), .label_ids = 10 * inputs};
  }
};

TEST(TrainerEvaluation, PredictionsAreInTheOrderOfTheDataSetAndEachSampleCountsOnce) {
  const SharedFolder folder;
  TrainingArguments arguments = quiet(folder);
  arguments.per_device_eval_batch_size = 3;
  for (const std::size_t samples : {4U, 5U, 12U, 13U, 26U}) {
    NumberTrainer trainer(same_net(), arguments);
    trainer.compute_metrics = [&](const EvalPrediction& all) {
      return std::map<std::string, double>{{"samples", all.label_ids.size(0)},
                                           {"own_rank", rank()}};
    };
    auto recorder = std::make_shared<Recorder>();
    trainer.add_callback(recorder);
    const PredictionOutput output = trainer.predict(Numbers(samples));
    const torch::Tensor expected = torch::arange(static_cast<std::int64_t>(samples));
    EXPECT_TRUE(torch::equal(output.label_ids, 10 * expected)) << output.label_ids;
    EXPECT_TRUE(torch::equal(output.predictions, torch::stack({expected, -expected}, 1).flatten()));
    EXPECT_EQ(output.metrics.at("test_samples"), static_cast<double>(samples));
    EXPECT_EQ(output.metrics.at("test_own_rank"), 0);
    EXPECT_FALSE(output.metrics.contains("test_loss"));
    EXPECT_EQ(recorder->calls, std::vector<std::string>{"predict 0"});
  }
}

TEST(TrainerEvaluation, MetricsAreComputedFromThePredictionsOfTheDefaultStep) {
  const SharedFolder folder;
  Net net = same_net();
  const auto error = [](const EvalPrediction& all) {
    return std::map<std::string, double>{
        {"error", torch::mse_loss(all.predictions, all.label_ids).item<double>()}};
  };
  PointTrainer trainer(net, quiet(folder), points(kSamples), points(kSamples - 1), error);
  const auto metrics = trainer.evaluate();
  EXPECT_NEAR(metrics.at("eval_error"), metrics.at("eval_loss"), 1e-6);
  EXPECT_EQ(trainer.state().log_history.back().at("eval_error"), metrics.at("eval_error"));
}

}  // namespace
}  // namespace hvd::testing
