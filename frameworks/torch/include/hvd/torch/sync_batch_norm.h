#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <type_traits>
#include <utility>

#include "hvd/process_set.h"

namespace hvd {

/// @addtogroup train
/// @{

namespace libtorch {

std::string layer_type(std::size_t dimensions);

/// @throws UsageError when this rank is not in the set
void check_layer_set(const ProcessSet& process_set, const std::string& who);

class LayerExchange;

/// A layer's exchanges with the other ranks of its set. They are numbered at their first use, so
/// ranks may construct different layers as long as they do not use them, in each generation of an
/// elastic job. Not thread-safe.
class LayerExchangeHolder {
 public:
  LayerExchangeHolder() = default;
  // A copy belongs to another layer, which has its own exchanges.
  LayerExchangeHolder(const LayerExchangeHolder&) noexcept {}
  LayerExchangeHolder& operator=(const LayerExchangeHolder&) noexcept { return *this; }
  ~LayerExchangeHolder() = default;

  const std::shared_ptr<LayerExchange>& in(const ProcessSet& process_set);

 private:
  std::shared_ptr<LayerExchange> exchange_;
  std::uint64_t generation_ = 0;  ///< of an elastic job, for which the exchange was made
};

}  // namespace libtorch

/// The base of SyncBatchNorm1d, 2d and 3d: LibTorch's BatchNorm with the statistics of the batches
/// of all ranks of a process set. Options, members and state keys are those of
/// torch::nn::BatchNorm1d, 2d and 3d, so a saved state of one loads into the other.
///
/// In training, forward and backward equal BatchNorm on the joined batch: outputs, running
/// statistics, and the gradient of the input for the sum of the ranks' losses. Gradients of weight
/// and bias are this rank's part, which DistributedOptimizer reduces. Batch sizes may differ
/// between ranks and may be 0. With eval(), or in a set of one rank, the layer is LibTorch's
/// BatchNorm and does not communicate.
///
/// Forward exchanges 2 + 2 * num_features numbers, and backward 2 * num_features if the input needs
/// a gradient. Both block, so every rank of the set runs the same layers in the same order. A rank
/// that leaves one out causes a StalledError. Not thread-safe.
template <std::size_t D, class Derived>
class SyncBatchNormImplBase
    : public torch::nn::NormImplBase<D, Derived, torch::nn::BatchNormOptions> {
 public:
  /// @param process_set the ranks whose batches are joined. Their weights must be equal
  /// (broadcast_parameters()). @throws UsageError when this rank is not in the set
  explicit SyncBatchNormImplBase(const torch::nn::BatchNormOptions& options_,
                                 ProcessSet process_set = {})
      : torch::nn::NormImplBase<D, Derived, torch::nn::BatchNormOptions>(options_),
        process_set_(std::move(process_set)) {
    libtorch::check_layer_set(process_set_, libtorch::layer_type(D));
  }

  /// Replaces another layer, which is LibTorch's or of this class. The layers share the parameters
  /// and buffers, so that an optimizer of the other layer remains valid, and are in the same mode.
  /// @throws UsageError as above
  template <class Other>
  explicit SyncBatchNormImplBase(
      const torch::nn::NormImplBase<D, Other, torch::nn::BatchNormOptions>& other,
      ProcessSet process_set = {})
      : SyncBatchNormImplBase(other.options, std::move(process_set)) {
    take_over(this->weight, "weight", other.weight);
    take_over(this->bias, "bias", other.bias);
    if (other.running_mean.defined()) {
      this->running_mean.set_data(other.running_mean);
      this->running_var.set_data(other.running_var);
      this->num_batches_tracked.set_data(other.num_batches_tracked);
    }
    this->train(other.is_training());
  }

  /// @param input floating point, of shape [N, num_features] or [N, num_features, L] (1d), [N,
  /// num_features, H, W] (2d), [N, num_features, D, H, W] (3d); N may be 0. Statistics are in
  /// float32, or in float64 for float64 inputs. @return a tensor of the input's shape and dtype
  /// @throws UsageError for another shape or dtype, and on every rank when all ranks together have
  /// fewer than two values per channel; MismatchError when ranks differ in num_features or dtype;
  /// StalledError, PeerLostError, ShutdownError; NotInitializedError in training before init().
  /// Running statistics are then unchanged. backward() throws the same, and a second derivative
  /// UsageError.
  torch::Tensor forward(const torch::Tensor& input);

  const ProcessSet& process_set() const noexcept { return process_set_; }

  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const torch::Tensor& input) override;

 private:
  void take_over(torch::Tensor& own, const char* key, const torch::Tensor& other) {
    if (other.defined()) own = this->parameters_[key] = other;
  }
  torch::Tensor forward_local(const torch::Tensor& input, double factor);
  torch::Tensor forward_joined(const torch::Tensor& input, double factor);

  ProcessSet process_set_;
  libtorch::LayerExchangeHolder exchange_;
};

class SyncBatchNorm1dImpl : public SyncBatchNormImplBase<1, SyncBatchNorm1dImpl> {
 public:
  using SyncBatchNormImplBase<1, SyncBatchNorm1dImpl>::SyncBatchNormImplBase;
};
class SyncBatchNorm2dImpl : public SyncBatchNormImplBase<2, SyncBatchNorm2dImpl> {
 public:
  using SyncBatchNormImplBase<2, SyncBatchNorm2dImpl>::SyncBatchNormImplBase;
};
class SyncBatchNorm3dImpl : public SyncBatchNormImplBase<3, SyncBatchNorm3dImpl> {
 public:
  using SyncBatchNormImplBase<3, SyncBatchNorm3dImpl>::SyncBatchNormImplBase;
};

/// Module holders: `hvd::SyncBatchNorm2d bn(64)`, `bn(torch::nn::BatchNorm2dOptions(64).eps(1e-3),
/// set)`.
TORCH_MODULE(SyncBatchNorm1d);
TORCH_MODULE(SyncBatchNorm2d);
TORCH_MODULE(SyncBatchNorm3d);

/// Replaces every BatchNorm1d, 2d and 3d below `module`, at any depth, by the synchronised layer
/// with the same parameters and buffers. Layers of types that derive from LibTorch's are not
/// replaced. Local.
///
/// Children of containers (Sequential, ModuleList, ModuleDict), and layers that are only
/// registered, can be replaced. A module that has a layer in a typed member
/// (`torch::nn::BatchNorm2d bn`) would still call the old layer, since C++ cannot change the
/// member's type. Declare such a member as hvd::SyncBatchNorm2d.
/// @return the number of replaced layers
/// @throws UsageError, and replaces no layer, with the paths of layers that are held by members;
/// when `module` is itself a BatchNorm; and when this rank is not in the set
std::size_t convert_sync_batchnorm(torch::nn::Module& module, const ProcessSet& process_set = {});

/// Refuses a module that Python has exported if it has BatchNorm layers: their code is compiled
/// into the module and has no place for an exchange. Rebuild the module in C++ and load its weights
/// (load_safetensors()).
/// @return 0 for a module without BatchNorm layers
/// @throws UsageError with the paths of the layers, and for a default-constructed module
std::size_t convert_sync_batchnorm(const torch::jit::Module& module,
                                   const ProcessSet& process_set = {});

/// The same for module holders and shared pointers to modules.
template <class Impl>
std::size_t convert_sync_batchnorm(const torch::nn::ModuleHolder<Impl>& module,
                                   const ProcessSet& process_set = {}) {
  return convert_sync_batchnorm(static_cast<torch::nn::Module&>(*module.ptr()), process_set);
}
template <class Module, std::enable_if_t<std::is_base_of_v<torch::nn::Module, Module>, int> = 0>
std::size_t convert_sync_batchnorm(const std::shared_ptr<Module>& module,
                                   const ProcessSet& process_set = {}) {
  return convert_sync_batchnorm(static_cast<torch::nn::Module&>(*module), process_set);
}

/// @}

}  // namespace hvd
