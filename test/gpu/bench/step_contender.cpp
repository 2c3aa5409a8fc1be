#include "gpu/bench/step_contender.h"

#include <ATen/autocast_mode.h>
#include <torch/nn/functional/loss.h>

#include <stdexcept>
#include <utility>

#include "hvd/torch/distributed_optimizer.h"

namespace hvd::bench {
namespace {

constexpr std::uint64_t kSeed = 1;
constexpr double kLearningRate =
    0.001;  // so small that the loss of the first steps depends on each of them
constexpr std::int64_t kClasses = 1000;
constexpr std::size_t kParameters = 161;

/// Enables autocast to bfloat16 in its scope.
class Autocast {
 public:
  explicit Autocast(torch::DeviceType type) : type_(type) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_dtype(type_, torch::kBFloat16);
    at::autocast::set_autocast_enabled(type_, true);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast() {
    at::autocast::set_autocast_enabled(type_, false);
    // Clears cached casts of weights, because the optimizer changes the weights next.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  }

 private:
  const torch::DeviceType type_;
};

ResNet50 make_model(torch::Device device) {
  torch::manual_seed(kSeed);
  ResNet50 model;
  std::size_t parameters = 0;
  model->to(device);
  for (torch::Tensor& parameter : model->parameters()) {
    if (parameter.dim() == 4) {
      // contiguous() would keep the strides of 1x1 kernels, and their gradients would have others.
      const auto options = parameter.options().memory_format(torch::MemoryFormat::ChannelsLast);
      parameter.set_data(
          torch::empty(parameter.sizes(), options.requires_grad(false)).copy_(parameter.detach()));
    }
    ++parameters;
  }
  if (parameters != kParameters) {
    throw std::logic_error("gpu_step_bench: ResNet-50 has " + std::to_string(kParameters) +
                           " parameters, this model " + std::to_string(parameters));
  }
  return model;
}

class HvdTraining final : public TrainingContender {
 public:
  HvdTraining(const std::string& name, const TrainingData& data,
              DistributedOptimizerOptions options)
      : TrainingContender(name, data),
        distributed_(sgd(), model()->named_parameters(), std::move(options)) {}

 protected:
  void clear() override { distributed_.zero_grad(); }
  void update() override { distributed_.step(); }

 private:
  DistributedOptimizer distributed_;
};

}  // namespace

TrainingData::TrainingData(torch::Device device, std::int64_t batch, std::int64_t side) {
  torch::manual_seed(kSeed);
  images =
      torch::randn({batch, 3, side, side}).contiguous(torch::MemoryFormat::ChannelsLast).to(device);
  labels = torch::randint(kClasses, {batch}).to(device);
}

TrainingContender::TrainingContender(std::string name, const TrainingData& data)
    : name_(std::move(name)),
      data_(data),
      model_(make_model(data.images.device())),
      sgd_(std::make_unique<torch::optim::SGD>(
          model_->parameters(), torch::optim::SGDOptions(kLearningRate).momentum(0.9))) {
  model_->train();
}

std::vector<torch::Tensor> TrainingContender::values() const {
  std::vector<torch::Tensor> copies;
  for (const torch::Tensor& parameter : model_->parameters())
    copies.push_back(parameter.detach().clone());
  return copies;
}

torch::Tensor TrainingContender::step() {
  clear();
  torch::Tensor loss;
  {
    const Autocast autocast(data_.images.device().type());
    loss = torch::nn::functional::cross_entropy(model_->forward(data_.images), data_.labels);
  }
  before_backward();
  loss.backward();
  update();
  return loss.detach();
}

std::unique_ptr<TrainingContender> make_training_contender(const std::string& name,
                                                           const TrainingData& data) {
  if (name == "bare") return std::make_unique<TrainingContender>(name, data);
  if (name == "hvd")
    return std::make_unique<HvdTraining>(name, data, DistributedOptimizerOptions{});
  if (name == "hvd-copy")
    return std::make_unique<HvdTraining>(
        name, data, DistributedOptimizerOptions{.gradient_as_bucket_view = false});
  if (name == "hvd-bf16")
    return std::make_unique<HvdTraining>(
        name, data, DistributedOptimizerOptions{.compression = Compression::kBFloat16});
  throw std::invalid_argument("gpu_step_bench: there is no contender '" + name +
                              "'; expected bare, hvd, hvd-copy or hvd-bf16");
}

}  // namespace hvd::bench
