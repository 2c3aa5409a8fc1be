// Trains a small network on MNIST or Fashion-MNIST with hvd::Trainer, on one rank or many, with a
// checkpoint after each epoch. The same command with --resume continues an interrupted run:
//   hvdrun -np 2 build/release/examples/mnist_trainer --output_dir /tmp/mnist
//   hvdrun -np 2 build/release/examples/mnist_trainer --output_dir /tmp/mnist --resume
// All of hvd::TrainingArguments are options, for example --bf16; --help lists them.

#include <hvd/trainer.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <map>
#include <optional>
#include <string>

#include "images.h"

namespace {

namespace nn = torch::nn;

struct NetImpl : nn::Module {
  nn::Conv2d conv1 = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 8, 3).stride(2)));
  nn::Conv2d conv2 = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(8, 16, 3).stride(2)));
  nn::Dropout dropout = register_module("dropout", nn::Dropout(0.1));
  nn::Linear fc = register_module("fc", nn::Linear(576, 10));

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv2(torch::relu(conv1(x))));
    return torch::log_softmax(fc(dropout(x.flatten(1))).to(torch::kFloat32), 1);
  }
};
TORCH_MODULE(Net);

struct MnistTrainer : hvd::Trainer<Net> {
  using Trainer::Trainer;
  torch::Tensor compute_loss(Net& model, const torch::data::Example<>& inputs) override {
    return torch::nll_loss(model->forward(inputs.data), inputs.target);
  }
};

std::map<std::string, double> accuracy(const hvd::EvalPrediction& all) {
  const torch::Tensor correct = all.predictions.argmax(1).eq(all.label_ids);
  return {{"accuracy", correct.to(torch::kFloat64).mean().item<double>()}};
}

}  // namespace

int main(int argc, char** argv) {
  hvd::TrainingArguments arguments{.output_dir = "mnist_trainer",
                                   .per_device_train_batch_size = 64,
                                   .per_device_eval_batch_size = 256,
                                   .num_train_epochs = 2,
                                   .learning_rate = 1e-3,
                                   .eval_strategy = hvd::Interval::kEpoch,
                                   .save_strategy = hvd::Interval::kEpoch,
                                   .save_total_limit = 2,
                                   .logging_steps = 100,
                                   .metric_for_best_model = "accuracy"};
  std::string data = Images::kFolder;
  bool resume = false;
  CLI::App app("Trains a small network on MNIST or Fashion-MNIST.");
  app.add_option("--data", data, "Folder with the four idx files, gzipped or not");
  app.add_flag("--resume", resume, "Continue from the newest checkpoint, if there is one");
  arguments.add_options(app);
  CLI11_PARSE(app, argc, argv);
  try {
    torch::manual_seed(1);
    MnistTrainer trainer(Net(), arguments, Images(data, "train"), Images(data, "t10k"), accuracy);
    trainer.train(resume ? hvd::get_last_checkpoint(arguments.output_dir) : std::nullopt);
    trainer.save_model();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mnist_trainer: %s\n", error.what());
    return 1;
  }
}
