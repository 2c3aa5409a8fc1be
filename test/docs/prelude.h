#pragma once

#include <hvd/accelerator.h>
#include <hvd/collectives.h>
#include <hvd/device.h>
#include <hvd/elastic.h>
#include <hvd/launch.h>
#include <hvd/point_to_point.h>
#include <hvd/reconfigure.h>
#include <hvd/torch.h>
#include <hvd/trainer.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

/// Declares the names that the pages' code uses and leaves out. check_code_blocks.py compiles the
/// code with them and does not link it, so they need no definition. A name that a block declares
/// itself hides the one here.
namespace docs {

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x);
};
TORCH_MODULE(Net);

/// A data set of images and labels.
struct ImageDataset : torch::data::datasets::Dataset<ImageDataset> {
  explicit ImageDataset(const std::string& folder);
  torch::data::Example<> get(std::size_t index) override;
  c10::optional<std::size_t> size() const override;
};
using Images = decltype(std::declval<ImageDataset>().map(torch::data::transforms::Stack<>()));
using Batch = torch::data::Example<>;

/// A type of the program, unknown to LibTorch.
struct Vocabulary {
  Vocabulary() = default;
  explicit Vocabulary(const std::vector<std::string>& words);
  std::vector<std::string> words() const;
};

extern Images dataset, train_set, test_set;
extern Net model, generator_net;
extern torch::nn::Sequential net;

extern torch::optim::SGD sgd;
extern torch::optim::AdamW adamw;
extern hvd::DistributedOptimizer optimizer;
extern torch::optim::StepLR scheduler, schedule;
extern hvd::GradScaler scaler;
extern hvd::DistributedSampler sampler;
extern std::unique_ptr<hvd::DataLoader<Images>> loader;
extern hvd::PreparedLoader<Images> train_loader;
extern hvd::GradientHook hook;
extern hvd::Handle handle;
extern hvd::TrainingState state;
extern hvd::Accelerator accelerator;
extern hvd::ProcessSet set;

/// A trainer, with its arguments.
struct MyTrainer : hvd::Trainer<Net> {
  using Trainer::Trainer;
  torch::Tensor compute_loss(Net& model, const Batch& inputs) override;
};
extern MyTrainer trainer;
extern hvd::TrainingArguments arguments;
extern hvd::OptimizerFactory optimizer_factory;
extern hvd::TrainerControl control;
extern CLI::App& app;
std::map<std::string, double> compute_metrics(const hvd::EvalPrediction& results);

/// Whether options in braces fit some function of hvd. `test` returns that for a type of options.
template <class Test>
constexpr bool fits_options(Test test) {
  return []<class... Types>(Test each) {
    return (each.template operator()<Types>() || ...);
  }.template operator()<hvd::AcceleratorOptions, hvd::AllreduceOptions, hvd::BackwardOptions,
                        hvd::CheckpointerOptions, hvd::CollectiveOptions, hvd::DataLoaderOptions,
                        hvd::DistributedOptimizerOptions, hvd::GradScalerOptions,
                        hvd::LaunchOptions, hvd::LoadCheckpointOptions, hvd::Options,
                        hvd::SamplerOptions, hvd::SaveCheckpointOptions, hvd::TrainingArguments>(
             test);
}

/// The program's own functions for one batch.
void train(const Batch& batch);
torch::Tensor loss_of(const Batch& batch);
torch::Tensor loss_of(Net& model, const std::vector<std::size_t>& samples);

extern Batch batch;
extern hvd::TensorView view;
extern torch::Tensor tensor, x, t, a, b, c, loss, output, out, coo, mean, deviation, predictions,
    table, predicted, target, splits;
extern std::vector<torch::Tensor> tensors;
extern int rank, size, r, n, first_epoch;
extern std::uint64_t seed, step;
extern std::size_t images;
extern std::string folder, name;
extern torch::nn::Sequential ema;
extern double best_accuracy;
extern c10::intrusive_ptr<c10d::Store> store;

}  // namespace docs
