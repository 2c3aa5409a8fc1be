#pragma once

#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpu/bench/resnet50.h"

namespace hvd::bench {

/// The training data of all contenders: random images that are equal on all ranks, so that the mean
/// gradient over ranks is that of one rank.
struct TrainingData {
  torch::Tensor images;  ///< [N, 3, side, side], float32, channels-last
  torch::Tensor labels;  ///< [N]

  TrainingData(torch::Device device, std::int64_t batch, std::int64_t side);
};

/// Trains its own ResNet-50 in bfloat16 (autocast), channels-last, by SGD with momentum, with bare
/// LibTorch. Derived classes override the virtual functions. All begin with equal values.
class TrainingContender {
 public:
  /// @param data must outlive it
  TrainingContender(std::string name, const TrainingData& data);
  TrainingContender(const TrainingContender&) = delete;
  TrainingContender& operator=(const TrainingContender&) = delete;
  virtual ~TrainingContender() = default;

  const std::string& name() const noexcept { return name_; }
  /// Queues one training step. @return the loss, a scalar on the device
  torch::Tensor step();
  /// Copies of the parameters, in the order in which the model declares them.
  std::vector<torch::Tensor> values() const;

 protected:
  virtual void clear() { sgd_->zero_grad(); }
  virtual void before_backward() {}
  virtual void update() { sgd_->step(); }

  ResNet50& model() noexcept { return model_; }
  torch::optim::SGD& sgd() noexcept { return *sgd_; }

 private:
  const std::string name_;
  const TrainingData& data_;
  ResNet50 model_{nullptr};
  std::unique_ptr<torch::optim::SGD> sgd_;
};

/// "bare", "hvd", "hvd-copy" (gradients are not views into buckets) or "hvd-bf16" (compressed).
/// @throws std::invalid_argument for another name
std::unique_ptr<TrainingContender> make_training_contender(const std::string& name,
                                                           const TrainingData& data);

/// c10d::Reducer, the engine of DistributedDataParallel: over NCCL ("ddp"), or, in a job of one
/// rank, over a backend whose allreduce does no work ("reducer-no-exchange"), which is a lower
/// bound of the cost of DistributedDataParallel. @throws std::runtime_error with the reason if it
/// cannot be created
std::unique_ptr<TrainingContender> make_reducer_contender(const std::string& name,
                                                          const TrainingData& data);

}  // namespace hvd::bench
