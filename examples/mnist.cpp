// Trains a small convolutional network on MNIST or Fashion-MNIST, on one rank or many:
//   hvdrun -np 2 build/release/examples/mnist --epochs 2
// On GPUs, in mixed precision:
//   hvdrun -np 2 build/release/examples/mnist --device cuda --precision bf16

#include <hvd/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "idx_dataset.h"

namespace {

namespace nn = torch::nn;

struct Settings {
  std::string data = "/usr/share/datasets/fashion-mnist";
  std::int64_t epochs = 2;
  std::size_t batch_size = 64;
  double lr = 1e-3;
  std::uint64_t seed = 1;
  std::string device = "auto";
  std::string precision = "fp32";
  std::string checkpoint;
  std::string resume;
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

/// Images stay bytes in memory and become floats a batch at a time.
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

// --- Progress ---

/// A bar that is drawn over on a terminal, a line per tenth of the epoch elsewhere. Silent but on
/// rank 0.
class Progress {
 public:
  Progress(std::int64_t epoch, std::int64_t epochs, std::size_t images)
      : label_("epoch " + std::to_string(epoch) + "/" + std::to_string(epochs)), images_(images) {}

  /// Reads the loss, and so waits for a GPU, only when it is shown.
  void update(std::size_t done, const torch::Tensor& loss) {
    if (hvd::rank() != 0) return;
    const auto now = Clock::now();
    const std::size_t percent = 100 * done / images_;
    const bool due = terminal_ ? now - drawn_ >= std::chrono::milliseconds(100) || done >= images_
                               : percent / 10 != percent_ / 10;
    if (!due) return;
    percent_ = percent;
    drawn_ = now;
    const double rate = static_cast<double>(done) / seconds(now);
    if (terminal_) {
      const std::size_t filled = percent * kWidth / 100;
      const std::string bar = std::string(filled, '=') + std::string(kWidth - filled, ' ');
      std::printf("\r%s [%s] %3zu %%  loss %.4f  %.0f images/s ", label_.c_str(), bar.c_str(),
                  percent, loss.item<double>(), rate);
    } else {
      std::printf("%s  %3zu %%  loss %.4f  %.0f images/s\n", label_.c_str(), percent,
                  loss.item<double>(), rate);
    }
    std::fflush(stdout);
  }

  void finish(double mean_loss) {
    if (hvd::rank() != 0) return;
    const double elapsed = seconds(Clock::now());
    std::printf("%s%s: mean loss %.4f, %.1f s, %.0f images/s on %d ranks\n",
                terminal_ ? "\r\033[K" : "", label_.c_str(), mean_loss, elapsed,
                static_cast<double>(images_) / elapsed, hvd::size());
    std::fflush(stdout);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kWidth = 30;

  double seconds(Clock::time_point now) const {
    return std::chrono::duration<double>(now - start_).count();
  }

  static bool is_terminal() {
    // Under hvdrun standard output is a pipe; the launcher says what is at its other end.
    const char* launcher = std::getenv("HVD_OUTPUT_TTY");
    return launcher != nullptr ? std::string_view(launcher) == "1" : isatty(STDOUT_FILENO) == 1;
  }

  const std::string label_;
  const std::size_t images_;
  const bool terminal_ = is_terminal();
  const Clock::time_point start_ = Clock::now();
  Clock::time_point drawn_ = {};
  std::size_t percent_ = 0;
};

// --- Checkpoint ---

void save_checkpoint(const std::string& file, const Net& model,
                     const torch::optim::Optimizer& optimizer, std::int64_t epochs_done) {
  torch::serialize::OutputArchive archive, model_archive, optimizer_archive;
  model->save(model_archive);
  optimizer.save(optimizer_archive);
  archive.write("model", model_archive);
  archive.write("optimizer", optimizer_archive);
  archive.write("epochs_done", c10::IValue(epochs_done));
  // A crash while writing must not cost the last good checkpoint.
  const std::string partial = file + ".partial";
  archive.save_to(partial);
  std::filesystem::rename(partial, file);
}

std::int64_t load_checkpoint(const std::string& file, Net& model,
                             torch::optim::Optimizer& optimizer, torch::Device device) {
  if (!std::filesystem::exists(file)) {
    throw std::runtime_error("checkpoint '" + file + "' does not exist");
  }
  torch::serialize::InputArchive archive, model_archive, optimizer_archive;
  archive.load_from(file, device);
  archive.read("model", model_archive);
  archive.read("optimizer", optimizer_archive);
  model->load(model_archive);
  optimizer.load(optimizer_archive);
  c10::IValue epochs_done;
  archive.read("epochs_done", epochs_done);
  return epochs_done.toInt();
}

// --- Training ---

/// Different dropout on every rank and in every epoch, and the same again after a resume.
void seed_epoch(const Settings& settings, std::int64_t epoch) {
  const auto size = static_cast<std::uint64_t>(hvd::size());
  const std::uint64_t stream =
      static_cast<std::uint64_t>(epoch) * size + static_cast<std::uint64_t>(hvd::rank());
  torch::manual_seed(settings.seed + 1000003 * (stream + 1));
}

template <class Loader>
void train_epoch(Loader& loader, Net& model, hvd::DistributedOptimizer& optimizer,
                 hvd::GradScaler& scaler, Progress progress, torch::Device device,
                 const std::string& precision) {
  model->train();
  torch::Tensor loss_sum = torch::zeros({}, device);
  std::int64_t steps = 0;
  std::size_t images = 0;
  for (Batch& batch : loader) {
    optimizer.zero_grad();
    torch::Tensor output;
    {
      const hvd::Autocast autocast(device, precision == "fp16" ? torch::kFloat16 : torch::kBFloat16,
                                   precision != "fp32");
      output = model->forward(batch.images.to(device));
    }
    const torch::Tensor loss = torch::nll_loss(output.to(torch::kFloat32), batch.labels.to(device));
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();

    loss_sum += loss.detach();
    ++steps;
    images += static_cast<std::size_t>(output.size(0) * hvd::size());
    progress.update(images, loss.detach());
  }
  const torch::Tensor mean = hvd::allreduce(loss_sum / steps, {.name = "mean loss"});
  progress.finish(mean.item<double>());
}

/// The fraction of the test set that is classified correctly. Each image is counted once: ranks
/// take every size-th, so some take one more, which is why nothing is reduced before the end.
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

double train(const Settings& settings) {
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    torch::set_num_threads(std::max(1, cores / hvd::local_size()));
  }
  const torch::Device device = choose_device(settings.device);
  const ImageDataset training(settings.data, "train");
  const ImageDataset test(settings.data, "t10k");

  torch::manual_seed(settings.seed);
  Net model;
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(settings.lr));

  std::int64_t first_epoch = 0;
  if (!settings.resume.empty() && hvd::rank() == 0) {
    first_epoch = load_checkpoint(settings.resume, model, optimizer, device);
  }
  first_epoch = hvd::broadcast_object(first_epoch);
  hvd::broadcast_parameters(model);
  hvd::broadcast_optimizer_state(optimizer);
  hvd::DistributedOptimizer distributed(optimizer, model->named_parameters());
  // bfloat16 has the range of float32.
  hvd::GradScaler scaler({.enabled = settings.precision == "fp16"});

  hvd::DistributedSampler sampler(training.size().value(), {.seed = settings.seed});
  const auto loader = torch::data::make_data_loader(training, sampler, settings.batch_size);
  const std::size_t images_per_epoch = sampler.size() * static_cast<std::size_t>(hvd::size());

  for (std::int64_t epoch = first_epoch; epoch < settings.epochs; ++epoch) {
    sampler.set_epoch(static_cast<std::size_t>(epoch));
    seed_epoch(settings, epoch);
    train_epoch(*loader, model, distributed, scaler,
                Progress(epoch + 1, settings.epochs, images_per_epoch), device, settings.precision);
    if (!settings.checkpoint.empty() && hvd::rank() == 0) {
      save_checkpoint(settings.checkpoint, model, optimizer, epoch + 1);
    }
  }
  return test_accuracy(test, model, device);
}

int run(const Settings& settings) {
  hvd::init();
  const int rank = hvd::rank();
  try {
    const double accuracy = train(settings);
    hvd::shutdown();
    if (rank == 0) std::printf("test accuracy %.4f\n", accuracy);
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
  app.add_option("--epochs", settings.epochs, "Epochs in all, those before a resume included")
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
  app.add_option("--checkpoint", settings.checkpoint, "File that rank 0 writes after each epoch");
  app.add_option("--resume", settings.resume, "Checkpoint to continue from");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(settings);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mnist: %s\n", error.what());
    return 1;
  }
}
