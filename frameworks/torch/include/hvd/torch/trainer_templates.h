#pragma once

/// Hides the types of a Trainer's data sets. <hvd/trainer.h> includes this file.

#include <torch/data/datasets.h>
#include <torch/data/example.h>
#include <torch/data/transforms/stack.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/accelerator.h"
#include "hvd/torch/data_loader.h"
#include "hvd/torch/to_device.h"

namespace hvd::libtorch {

template <class T>
concept DatasetType = requires(T& set) {
  typename T::BatchType;
  typename T::BatchRequestType;
  { set.size() } -> std::convertible_to<std::optional<std::size_t>>;
};

/// A model whose forward pass takes the batch's data, and a batch with labels.
template <class Model, class Example>
concept HasForward = requires(Model& model, const Example& inputs) {
  { model->forward(inputs.data) } -> std::convertible_to<torch::Tensor>;
  { inputs.target } -> std::convertible_to<torch::Tensor>;
};

/// The module of a holder or of a shared_ptr; null if it is empty.
template <class Model>
std::shared_ptr<torch::nn::Module> module_pointer(const Model& model) {
  if constexpr (ModuleHolderType<Model>) {
    if (model.is_empty()) return nullptr;
    return model.ptr();
  } else {
    static_assert(std::convertible_to<const Model&, std::shared_ptr<torch::nn::Module>>,
                  "hvd: a Trainer's model is a module holder (TORCH_MODULE) or a shared_ptr to a "
                  "module");
    return model;
  }
}

/// A data set and its loader. Not thread-safe.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  /// The size of the data set.
  virtual std::optional<std::size_t> samples() const = 0;
  /// Starts at the first batch of epoch 0. The first call makes the loader. Collective.
  /// @param options the same in every call
  /// @param train true: the accelerator prepares the loader
  virtual void open(Accelerator& accelerator, const DataLoaderOptions& options, bool train) = 0;
  /// The next batch of the epoch, on the accelerator's device, valid until the next call; null at
  /// the end, and then the next call starts the next epoch. The first call in an epoch is
  /// collective.
  virtual const void* next() = 0;
  /// Continues after the first batches of an epoch. After open() with `train`.
  virtual void go_to(Accelerator& accelerator, std::size_t epoch, std::size_t batches) = 0;
  /// Skips the rest of the epoch.
  virtual void end_epoch() = 0;
  /// The same as the functions of DataLoader.
  virtual std::size_t epoch() const = 0;
  virtual std::size_t samples_used() const = 0;
  virtual std::size_t batches_left() const = 0;
};

template <class Dataset>
class DatasetBatches final : public BatchSource {
 public:
  explicit DatasetBatches(Dataset set) : samples_(set.size()), set_(std::move(set)) {}

  std::optional<std::size_t> samples() const override { return samples_; }
  void open(Accelerator& accelerator, const DataLoaderOptions& options, bool train) override {
    prepared_at_.reset();
    at_.reset();
    prepared_.reset();
    if (!loader_) {
      loader_ = hvd::loader(std::move(*set_), options);
      set_.reset();
    }
    loader_->set_epoch(loader_->epoch() + 1);
    loader_->set_epoch(0);
    device_ = accelerator.device();
    if (train) prepared_.emplace(accelerator.prepare(*loader_));
  }
  const void* next() override {
    if (prepared_) return advance(*prepared_, prepared_at_);
    auto* const batch = advance(*loader_, at_);
    if (batch != nullptr) move_to_device(*batch, device_);
    return batch;
  }
  void go_to(Accelerator& accelerator, std::size_t epoch, std::size_t batches) override {
    prepared_at_.reset();
    loader_->set_epoch(epoch + 1);
    loader_->set_epoch(epoch);
    if (batches > 0) accelerator.skip_first_batches(*prepared_, batches);
  }
  void end_epoch() override {
    prepared_at_.reset();
    at_.reset();
    loader_->set_epoch(loader_->epoch() + 1);
  }
  std::size_t epoch() const override { return loader_->epoch(); }
  std::size_t samples_used() const override { return loader_->samples_used(); }
  std::size_t batches_left() const override { return loader_->batches_left(); }

 private:
  using Loader = DataLoader<Dataset>;
  using Batch = typename Loader::BatchType;

  template <class Range, class Iterator>
  static Batch* advance(Range& range, std::optional<Iterator>& at) {
    if (at) {
      ++*at;
    } else {
      at.emplace(range.begin());
    }
    if (*at == range.end()) {
      at.reset();
      return nullptr;
    }
    return &**at;
  }

  std::optional<std::size_t> samples_;
  std::optional<Dataset> set_;  ///< until the loader has it
  std::unique_ptr<Loader> loader_;
  std::optional<PreparedLoader<Dataset>> prepared_;
  torch::Device device_ = torch::kCPU;
  // Iterators refer to the loader, so they are destroyed before it.
  std::optional<typename PreparedLoader<Dataset>::Iterator> prepared_at_;
  std::optional<torch::data::Iterator<Batch>> at_;
};

template <class Example, class Dataset>
std::unique_ptr<BatchSource> batches_of(Dataset set) {
  using Batch = typename Dataset::BatchType;
  if constexpr (std::same_as<Batch, Example>) {
    return std::make_unique<DatasetBatches<Dataset>>(std::move(set));
  } else {
    static_assert(
        std::same_as<Batch, std::vector<Example>> &&
            requires { torch::data::transforms::Stack<Example>(); },
        "hvd: the batches of a Trainer's data sets have the type Trainer's second "
        "argument; map the data set, for example by "
        "map(torch::data::transforms::Stack<>()), or name its batch type");
    return batches_of<Example>(set.map(torch::data::transforms::Stack<Example>()));
  }
}

}  // namespace hvd::libtorch
