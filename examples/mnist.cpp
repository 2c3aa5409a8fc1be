// Trains a small convolutional network on MNIST or Fashion-MNIST, on one rank or many:
//   hvdrun -np 2 build/release/examples/mnist --epochs 2
// On GPUs, in mixed precision:
//   hvdrun -np 2 build/release/examples/mnist --device cuda --precision bf16
// With checkpoints, from which the same command resumes, on any number of ranks:
//   hvdrun -np 2 build/release/examples/mnist --checkpoints /tmp/mnist

#include <hvd/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "idx_dataset.h"

namespace {

namespace nn = torch::nn;

struct Settings {
  std::string data = "/usr/share/datasets/fashion-mnist";
  std::int64_t epochs = 2;
  std::int64_t batch_size = 64;
  double lr = 1e-3;
  std::uint64_t seed = 1;
  std::string device = "auto";
  std::string precision = "fp32";
  std::int64_t workers = 0;
  std::string checkpoints;
};

// --- Model ---

class NetImpl : public nn::Module {
 public:
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv1_(x));
    x = torch::relu(conv2_(x));
    x = dropout1_(torch::max_pool2d(x, 2));
    x = torch::relu(fc1_(x.flatten(1)));
    return torch::log_softmax(fc2_(dropout2_(x)), 1);
  }

 private:
  nn::Conv2d conv1_ = register_module("conv1", nn::Conv2d(1, 32, 3));
  nn::Conv2d conv2_ = register_module("conv2", nn::Conv2d(32, 64, 3));
  nn::Dropout dropout1_ = register_module("dropout1", nn::Dropout(0.25));
  nn::Dropout dropout2_ = register_module("dropout2", nn::Dropout(0.5));
  nn::Linear fc1_ = register_module("fc1", nn::Linear(9216, 128));
  nn::Linear fc2_ = register_module("fc2", nn::Linear(128, 10));
};
TORCH_MODULE(Net);

// --- Device and precision ---

torch::Device choose_device(const std::string& wanted) {
  if (wanted == "cpu") return torch::kCPU;
  const torch::Device device = hvd::device();
  if (wanted == "cuda" && !device.is_cuda()) {
    throw std::runtime_error(
        std::string(
            "--device cuda: expected a GPU that both hvd and LibTorch can use, found none (") +
        (hvd::cuda_built() ? "is there a driver, and a LibTorch with CUDA?"
                           : "this hvd was built without CUDA") +
        "); use --device cpu, and see hvdrun --check-build");
  }
  return device;
}

// --- Data ---

struct Batch {
  torch::Tensor images;  ///< [N, 1, 28, 28], float
  torch::Tensor labels;  ///< [N]
};

/// Images are kept as bytes in memory and converted to floats batch by batch.
class ImageDataset : public torch::data::datasets::BatchDataset<ImageDataset, Batch> {
 public:
  ImageDataset(const std::filesystem::path& dir, const char* prefix) {
    idx::Dataset files = idx::read_dataset(dir, prefix);
    const std::vector<std::int64_t>& shape = files.images.shape;
    if (shape[0] == 0 || shape[1] != 28 || shape[2] != 28) {
      throw std::runtime_error("the images of '" + std::string(prefix) + "' in '" + dir.string() +
                               "' are not 28 x 28");
    }
    images_ =
        torch::from_blob(files.images.data.data(), {shape[0], 1, 28, 28}, torch::kUInt8).clone();
    labels_ =
        torch::from_blob(files.labels.data.data(), {shape[0]}, torch::kUInt8).to(torch::kInt64);
    if (labels_.max().item<std::int64_t>() > 9) {
      throw std::runtime_error("labels above 9 in '" + dir.string() + "'");
    }
  }

  Batch get_batch(c10::ArrayRef<std::size_t> indices) override {
    const std::vector<std::int64_t> rows(indices.begin(), indices.end());
    return select(torch::tensor(rows));
  }
  Batch select(const torch::Tensor& rows) const {
    const torch::Tensor images = images_.index_select(0, rows).to(torch::kFloat32);
    return {images.div_(255).sub_(0.5).div_(0.5), labels_.index_select(0, rows)};
  }
  std::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(images_.size(0));
  }

 private:
  torch::Tensor images_, labels_;
};

// --- Training ---

std::string text(const char* format, double value) {
  std::array<char, 64> written{};
  std::snprintf(written.data(), written.size(), format, value);
  return written.data();
}

/// The model, its optimizer and its data, all of which are in a checkpoint.
class Training {
 public:
  Training(const Settings& settings, const ImageDataset& images, torch::Device device)
      : settings_(settings), device_(device), images_(images.size().value()) {
    // All ranks start with rank 0's weights; dropout differs by rank.
    hvd::RandomStreams(settings.seed).seed_default();
    model_ = Net();
    model_->to(device);
    hvd::broadcast_parameters(model_);
    adamw_.emplace(model_->parameters(), torch::optim::AdamWOptions(settings.lr));
    optimizer_.emplace(*adamw_, model_->named_parameters());
    loader_ = hvd::make_data_loader(
        images,
        {.batch_size = settings.batch_size, .workers = settings.workers, .seed = settings.seed});
    if (!settings.checkpoints.empty()) resume();
  }

  Net& model() { return model_; }

  /// @return false if the job got a signal to end and a checkpoint has been written
  bool run() {
    while (loader_->epoch() < static_cast<std::size_t>(settings_.epochs)) {
      if (!run_epoch()) return false;
      if (checkpointer_) checkpointer_->save(step_);
    }
    if (checkpointer_) checkpointer_->wait();
    return true;
  }

 private:
  void resume() {
    hvd::TrainingState state;
    state.model(model_).optimizer(*optimizer_).scaler(scaler_).loader(*loader_).random();
    checkpointer_.emplace(
        settings_.checkpoints, state,
        hvd::CheckpointerOptions{.keep = 2, .background = true, .save_on_sigterm = true});
    const std::optional<std::uint64_t> step = checkpointer_->load();
    if (!step) return;
    step_ = *step;
    if (hvd::rank() == 0) {
      std::printf("resumed after step %llu, in epoch %zu\n", static_cast<unsigned long long>(step_),
                  loader_->epoch() + 1);
    }
  }

  bool run_epoch() {
    model_->train();
    const std::string label =
        "epoch " + std::to_string(loader_->epoch() + 1) + "/" + std::to_string(settings_.epochs);
    // A resumed epoch begins after the samples that were used before.
    hvd::ProgressBar progress(static_cast<std::int64_t>(images_),
                              {.label = label,
                               .unit = "images",
                               .initial = static_cast<std::int64_t>(loader_->samples_used())});
    hvd::Metric mean_loss("mean loss");
    for (Batch& batch : *loader_) {
      const torch::Tensor loss = run_step(batch);
      mean_loss.update(loss, static_cast<double>(batch.labels.size(0)));
      // Reads the loss, which waits for a GPU, only when it is printed.
      progress.update(static_cast<std::int64_t>(loader_->samples_used()),
                      [&] { return text("loss %.4f", loss.item<double>()); });
      if (checkpointer_ && checkpointer_->should_stop(step_)) return false;
    }
    const double mean = mean_loss.compute();
    progress.finish(label + text(": mean loss %.4f", mean) + text(", %.1f s", progress.seconds()) +
                    text(", %.0f images/s on ", progress.throughput()) +
                    std::to_string(hvd::size()) + " ranks");
    return true;
  }

  torch::Tensor run_step(const Batch& batch) {
    optimizer_->zero_grad();
    torch::Tensor output;
    {
      const bool fp16 = settings_.precision == "fp16";
      const hvd::Autocast autocast(device_, fp16 ? torch::kFloat16 : torch::kBFloat16,
                                   settings_.precision != "fp32");
      output = model_->forward(batch.images.to(device_));
    }
    const torch::Tensor loss =
        torch::nll_loss(output.to(torch::kFloat32), batch.labels.to(device_));
    scaler_.scale(loss).backward();
    scaler_.step(*optimizer_);
    scaler_.update();
    ++step_;
    return loss.detach();
  }

  const Settings& settings_;
  const torch::Device device_;
  const std::size_t images_;
  Net model_{nullptr};
  std::optional<torch::optim::AdamW> adamw_;
  std::optional<hvd::DistributedOptimizer> optimizer_;
  // bfloat16 has the range of float32.
  hvd::GradScaler scaler_{{.enabled = settings_.precision == "fp16"}};
  std::unique_ptr<hvd::DataLoader<ImageDataset>> loader_;
  std::optional<hvd::Checkpointer> checkpointer_;
  std::uint64_t step_ = 0;
};

/// Returns the fraction of the test set that is classified correctly. Each rank takes every size-th
/// image. Some ranks take one more, so the counts are reduced only at the end.
double test_accuracy(const ImageDataset& dataset, Net& model, torch::Device device) {
  torch::NoGradGuard no_grad;
  model->eval();
  const auto total = static_cast<std::int64_t>(dataset.size().value());
  torch::Tensor correct = torch::zeros({}, torch::kInt64);
  if (hvd::rank() < total) {
    for (const torch::Tensor& rows : torch::arange(hvd::rank(), total, hvd::size()).split(1000)) {
      const Batch batch = dataset.select(rows);
      const torch::Tensor predicted = model->forward(batch.images.to(device)).argmax(1).cpu();
      correct += predicted.eq(batch.labels).sum();
    }
  }
  correct = hvd::allreduce(correct, {.name = "correct", .op = hvd::ReduceOp::kSum});
  return static_cast<double>(correct.item<std::int64_t>()) / static_cast<double>(total);
}

/// @return the accuracy; nullopt if the job got a signal to end
std::optional<double> train(const Settings& settings) {
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    torch::set_num_threads(std::max(1, cores / hvd::local_size()));
  }
  const torch::Device device = choose_device(settings.device);
  const ImageDataset images(settings.data, "train");
  const ImageDataset test(settings.data, "t10k");
  Training training(settings, images, device);
  if (!training.run()) return std::nullopt;
  return test_accuracy(test, training.model(), device);
}

int run(const Settings& settings) {
  hvd::init();
  const int rank = hvd::rank();
  try {
    const std::optional<double> accuracy = train(settings);
    hvd::shutdown();
    if (rank == 0 && accuracy) std::printf("test accuracy %.4f\n", *accuracy);
    if (rank == 0 && !accuracy) std::printf("stopped by SIGTERM; run the same command to resume\n");
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "mnist: rank %d: %s\n", rank, error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mnist: rank %d: %s\n", rank, error.what());
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Trains a small convolutional network on MNIST or Fashion-MNIST.");
  app.add_option("--data", settings.data, "Folder with the four idx files, gzipped or not")
      ->capture_default_str();
  app.add_option("--epochs", settings.epochs, "Epochs in all, with those of earlier runs")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "Images per step and rank")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  app.add_option("--lr", settings.lr, "Learning rate of AdamW")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "Seed of weights, order and dropout")
      ->capture_default_str();
  app.add_option("--device", settings.device, "cpu, cuda, or auto: a GPU if there is one")
      ->check(CLI::IsMember({"cpu", "cuda", "auto"}))
      ->capture_default_str();
  app.add_option("--precision", settings.precision,
                 "fp32, or fp16 or bf16 where that is safe (autocast)")
      ->check(CLI::IsMember({"fp32", "fp16", "bf16"}))
      ->capture_default_str();
  app.add_option("--workers", settings.workers, "Threads per rank that load ahead")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  app.add_option("--checkpoints", settings.checkpoints,
                 "Folder for a checkpoint after each epoch and on SIGTERM; resumes from the newest "
                 "that is there");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mnist: %s\n", error.what());
    return 1;
  }
}
