#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <concepts>
#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "hvd/torch/data_loader.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/sharded_optimizer.h"
#include "hvd/torch/to_device.h"

namespace hvd {

class Accelerator;

namespace libtorch {

struct AcceleratorCore;

/// The running loops over loaders, the innermost last, with the position of each loop's current
/// batch.
class RunningLoaders {
 public:
  struct Loop {
    BatchPlace place;
    bool has_batch = false;
  };

  /// Begins a loop, which ends when the last copy of the result is destroyed.
  static std::shared_ptr<Loop> begin(const std::shared_ptr<RunningLoaders>& loaders);
  /// The place of the innermost loop's batch; null outside of loops.
  const BatchPlace* place() const noexcept;

 private:
  std::vector<const Loop*> loops_;
};

/// The arguments of Accelerator::prepare(), in order.
struct PreparedModule {
  torch::nn::Module* module = nullptr;            ///< null for a module that Python has exported
  std::shared_ptr<torch::nn::Module> owner;       ///< null: the program owns the module
  std::optional<torch::jit::Module> script = {};  ///< a module that Python has exported
};
using PreparedScheduler =
    std::variant<torch::optim::LRScheduler*, torch::optim::ReduceLROnPlateauScheduler*>;
using PrepareArgument = std::variant<PreparedModule, torch::optim::Optimizer*, PreparedScheduler,
                                     std::shared_ptr<LoaderProgress>>;

}  // namespace libtorch

/// @addtogroup train
/// @{

/// An optimizer that Accelerator::prepare() has wrapped. step() and zero_grad() have an effect only
/// when a step is due (Accelerator::sync_gradients()). Converts to the wrapper where a function
/// takes a torch::optim::Optimizer. Owned by the accelerator, until free_memory(); refers to the
/// program's optimizer. Not thread-safe.
class AcceleratedOptimizer {
 public:
  AcceleratedOptimizer(const AcceleratedOptimizer&) = delete;
  AcceleratedOptimizer& operator=(const AcceleratedOptimizer&) = delete;
  ~AcceleratedOptimizer();

  /// Waits for the reduced gradients and steps. With Precision::kFP16 it first divides them by the
  /// loss scale, unless unscale_gradients() has done so, and skips the step on every rank if a
  /// gradient of any rank is inf or nan. Collective when a step is due. @return the closure's loss;
  /// undefined without a closure and when no step is due
  /// @throws UsageError for a closure with Precision::kFP16; as DistributedOptimizer::step()
  torch::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);
  void zero_grad(bool set_to_none = true);
  /// Whether the last step() that was due was skipped, because of inf or nan.
  bool step_was_skipped() const noexcept { return skipped_; }

  /// Like the functions of Accelerator, for the parameters of this optimizer.
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  void clip_grad_value_(double clip_value);
  void unscale_gradients();

  /// The program's optimizer.
  torch::optim::Optimizer& inner() noexcept { return wrapper().inner(); }
  /// The DistributedOptimizer or ShardedOptimizer.
  OptimizerWrapper& wrapper() noexcept;
  operator torch::optim::Optimizer&() noexcept { return wrapper(); }
  std::vector<torch::optim::OptimizerParamGroup>& param_groups() noexcept {
    return wrapper().param_groups();
  }
  auto& state() noexcept { return wrapper().state(); }

 private:
  friend class Accelerator;
  friend struct libtorch::AcceleratorCore;

  using Wrapper =
      std::variant<std::unique_ptr<DistributedOptimizer>, std::unique_ptr<ShardedOptimizer>>;
  AcceleratedOptimizer(libtorch::AcceleratorCore& core, torch::optim::Optimizer& inner,
                       Wrapper wrapper);

  libtorch::AcceleratorCore& core_;
  torch::optim::Optimizer& inner_;
  const Wrapper wrapper_;
  bool unscaled_ = false, skipped_ = false;
};

/// A learning-rate scheduler that Accelerator::prepare() has bound to its optimizers. Owned by the
/// accelerator, until free_memory(); refers to the program's scheduler. Not thread-safe.
class AcceleratedScheduler {
 public:
  AcceleratedScheduler(const AcceleratedScheduler&) = delete;
  AcceleratedScheduler& operator=(const AcceleratedScheduler&) = delete;

  /// Steps once, regardless of the number of ranks, if the optimizers have stepped. Has no effect
  /// if no step was due or the step was skipped. @throws UsageError for a
  /// ReduceLROnPlateauScheduler
  void step();
  /// The same for a ReduceLROnPlateauScheduler. @param metric equal on every rank, such as the
  /// result of Metric::compute(); different values would make the learning rates differ
  /// @throws UsageError for another scheduler
  void step(double metric);

 private:
  friend class Accelerator;
  friend struct libtorch::AcceleratorCore;
  AcceleratedScheduler(const libtorch::AcceleratorCore& core, libtorch::PreparedScheduler inner,
                       std::vector<const AcceleratedOptimizer*> optimizers)
      : core_(core), inner_(inner), optimizers_(std::move(optimizers)) {}
  bool due() const;

  const libtorch::AcceleratorCore& core_;
  const libtorch::PreparedScheduler inner_;
  const std::vector<const AcceleratedOptimizer*> optimizers_;
};

/// A loader of the program that moves its batches to the accelerator's device. `*train_loader` and
/// `train_loader` are ranges of batches. Copies refer to the same loader, which must outlive them.
/// While a loop runs, its last batch ends an accumulation, and gather_for_metrics() leaves out the
/// samples that are repeated in it. Not thread-safe.
template <class Dataset>
class PreparedLoader {
 public:
  using BatchType = typename DataLoader<Dataset>::BatchType;

  /// Iterates over the unused batches of the epoch, once. See DataLoader.
  class Iterator {
   public:
    using difference_type = std::ptrdiff_t;
    using value_type = BatchType;
    using pointer = BatchType*;
    using reference = BatchType&;
    using iterator_category = std::input_iterator_tag;

    /// Counts the batch as used, and moves it to the device.
    BatchType& operator*() {
      if (batch_ == nullptr) {
        loop_->place = progress_->next_batch();
        batch_ = &*inner_;
        loop_->has_batch = true;
        if (device_) libtorch::move_to_device(*batch_, *device_);
      }
      return *batch_;
    }
    BatchType* operator->() { return &**this; }
    Iterator& operator++() {
      batch_ = nullptr;
      ++inner_;
      return *this;
    }
    bool operator==(const Iterator& other) const { return inner_ == other.inner_; }

   private:
    friend class PreparedLoader;
    Iterator(torch::data::Iterator<BatchType> inner,
             std::shared_ptr<libtorch::LoaderProgress> progress, std::optional<c10::Device> device,
             std::shared_ptr<libtorch::RunningLoaders::Loop> loop)
        : inner_(std::move(inner)),
          progress_(std::move(progress)),
          device_(device),
          loop_(std::move(loop)) {}

    torch::data::Iterator<BatchType> inner_;
    std::shared_ptr<libtorch::LoaderProgress> progress_;
    std::optional<c10::Device> device_;
    std::shared_ptr<libtorch::RunningLoaders::Loop> loop_;
    BatchType* batch_ = nullptr;  ///< null until it is on the device
  };

  /// A copy, so that `for (auto& batch : *accelerator.skip_first_batches(...))` is valid.
  PreparedLoader operator*() const { return *this; }
  const PreparedLoader* operator->() const noexcept { return this; }

  /// Like DataLoader::begin(). Collective.
  Iterator begin() const {
    auto inner = loader_->begin();
    return Iterator(std::move(inner), progress(), device_,
                    libtorch::RunningLoaders::begin(running_));
  }
  Iterator end() const { return Iterator(loader_->end(), nullptr, device_, nullptr); }

  /// Like the functions of DataLoader.
  std::size_t epoch() const noexcept { return loader_->epoch(); }
  void set_epoch(std::size_t epoch) const { loader_->set_epoch(epoch); }
  std::size_t samples_used() const noexcept { return loader_->samples_used(); }
  std::size_t batches_left() const noexcept { return loader_->batches_left(); }
  /// The program's loader.
  DataLoader<Dataset>& inner() const noexcept { return *loader_; }

 private:
  friend class Accelerator;
  PreparedLoader(DataLoader<Dataset>& loader, std::shared_ptr<libtorch::RunningLoaders> running,
                 std::optional<c10::Device> device)
      : loader_(&loader), running_(std::move(running)), device_(device) {}

  /// Null for a null pointer.
  static std::shared_ptr<libtorch::LoaderProgress> progress_of(DataLoader<Dataset>* loader) {
    return loader == nullptr ? nullptr : loader->progress();
  }
  const std::shared_ptr<libtorch::LoaderProgress>& progress() const { return loader_->progress(); }

  DataLoader<Dataset>* loader_;
  std::shared_ptr<libtorch::RunningLoaders> running_;
  std::optional<c10::Device> device_;  ///< not set: batches stay where they are
};

/// @}

namespace libtorch {

template <class T>
concept ModuleHolderType = std::is_base_of_v<torch::detail::ModuleHolderIndicator, T>;
template <class T>
concept PointerType = requires(T& pointer) {
  typename T::element_type;
  { pointer.get() } -> std::same_as<typename T::element_type*>;
};
template <class T>
concept SchedulerType = std::derived_from<T, torch::optim::LRScheduler> ||
                        std::derived_from<T, torch::optim::ReduceLROnPlateauScheduler>;
template <class Dataset, class Batch, class Request>
void accept_torch_loader(const torch::data::DataLoaderBase<Dataset, Batch, Request>&);
/// LibTorch's own data loaders.
template <class T>
concept TorchLoaderType = requires(const T& loader) { accept_torch_loader(loader); };
template <class T>
struct IsHvdLoader : std::false_type {};
template <class Dataset>
struct IsHvdLoader<DataLoader<Dataset>> : std::true_type {};
template <class Dataset>
PreparedLoader<Dataset> prepared_loader_of(const DataLoader<Dataset>*);
template <class T>
struct IsPrepared : std::bool_constant<std::same_as<T, AcceleratedOptimizer> ||
                                       std::same_as<T, AcceleratedScheduler>> {};
template <class Dataset>
struct IsPrepared<PreparedLoader<Dataset>> : std::true_type {};

/// Returns a smart pointer's get(), which may be null, and the address of any other object.
template <class T>
auto* address_of(T& object) noexcept {
  if constexpr (PointerType<T>) {
    return object.get();
  } else {
    return std::addressof(object);
  }
}
template <class T>
using Pointee =
    std::remove_cvref_t<decltype(*address_of(std::declval<std::remove_reference_t<T>&>()))>;

}  // namespace libtorch

}  // namespace hvd
