#pragma once

#include <ATen/core/Generator.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/serialize/archive.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "hvd/torch/object.h"

namespace hvd {

/// @addtogroup save
/// @{

class Accelerator;
class DistributedOptimizer;
class DistributedSampler;
class GradScaler;
class Metric;
class RandomStreams;
class ShardedOptimizer;
template <class Dataset>
class DataLoader;

namespace libtorch {

struct AcceleratorCore;
class LoaderProgress;

/// A part of a program's state, as a checkpoint stores it. Not thread-safe.
class StateItem {
 public:
  virtual ~StateItem() = default;
  /// Names the item's type. Bytes of another kind are not loaded into the item.
  virtual std::string kind() const = 0;
  /// The kind of the bytes that encode() appends.
  virtual std::string stored_kind() const { return kind(); }
  /// true: each rank has its own state. false: all ranks load the first rank's.
  virtual bool per_rank() const { return false; }
  /// A text that must be equal on all ranks that save the item; empty: nothing is compared.
  virtual std::string in_common() const { return {}; }
  /// Whether encode() appends tensors that should be equal on all ranks.
  virtual bool has_replicated_tensors() const { return false; }
  /// Appends the item's bytes.
  virtual void encode(ObjectWriter& writer) const = 0;
  /// Checks bytes of encode() without changing anything. The returned function makes the change and
  /// must not fail for a reason that decode() could have found. @throws an error for the user
  virtual std::function<void()> decode(std::string_view bytes) = 0;
  /// Like decode(), on a rank that did not exist when the checkpoint was saved.
  /// @param bytes of another rank @param rank this rank's position
  virtual std::function<void()> decode_for_new_rank(std::string_view bytes, int rank) {
    (void)rank;
    return decode(bytes);
  }
  /// Whether the parts of all ranks are loaded, with decode_shards(), at another number of ranks.
  virtual bool merges() const { return false; }
  /// Whether decode_shards() accepts the ranks' parts of a sharded optimizer.
  virtual bool takes_shards() const { return false; }
  /// Like decode(). @param shards the bytes of every rank that saved the checkpoint, in rank order
  virtual std::function<void()> decode_shards(const std::vector<std::string_view>& shards) {
    return decode(shards.front());
  }
  /// Sends the state of `root_rank` to all ranks of the job. Collective. @throws on every rank if
  /// it throws on one
  virtual void broadcast(int root_rank, const std::string& name);
  /// The same for the part that the ranks have in common. Collective.
  virtual void broadcast_shared(int root_rank, const std::string& name) {
    if (!per_rank()) broadcast(root_rank, name);
  }
};

template <class T>
class ValueItem final : public StateItem {
 public:
  ValueItem(T& value, bool per_rank) : value_(value), per_rank_(per_rank) {}
  std::string kind() const override {
    return std::string(per_rank_ ? "value of each rank " : "value ") + typeid(T).name();
  }
  bool per_rank() const override { return per_rank_; }
  void encode(ObjectWriter& writer) const override { ObjectCodec<T>::write(writer, value_); }
  std::function<void()> decode(std::string_view bytes) override {
    auto decoded = std::make_shared<T>(decode_object<T>(bytes));
    return [this, decoded] { value_ = std::move(*decoded); };
  }
  std::function<void()> decode_for_new_rank(std::string_view bytes, int /*rank*/) override {
    decode_object<T>(bytes);  // checks the bytes
    return [] {};
  }

 private:
  T& value_;
  const bool per_rank_;
};

}  // namespace libtorch

/// Options for loading a model.
struct ModelStateOptions {
  std::string name = "model";
  /// false: tensors of the model that the checkpoint does not have, or has with another shape or
  /// dtype, do not change, and tensors of the checkpoint that the model does not have are ignored.
  /// The first rank warns and names them. For a model with a new head.
  bool strict = true;
  /// Maps the name of a parameter or buffer in this model to its name in the checkpoint, for a
  /// model whose modules have been renamed. The returned names must be distinct. Not used for
  /// saving. Empty: the names are equal.
  std::function<std::string(const std::string&)> key_in_checkpoint = {};
};

/// The items of a checkpoint, by name:
///
///     hvd::TrainingState state;
///     state.model(net).optimizer(optimizer).sampler(sampler).random().value("epoch", epoch);
///
/// Refers to its arguments, which must outlive it. A module that is owned by a shared_ptr or a
/// module holder is kept alive. Every rank adds the same items in the same order, with distinct
/// names. Copies refer to the same objects. Not thread-safe.
class TrainingState {
 public:
  /// Parameters and buffers, by their names in the module. Loading copies into the module's
  /// tensors.
  /// @throws UsageError, as all functions below, for a name that is empty or in use
  TrainingState& model(torch::nn::Module& module, const std::string& name = "model");
  /// Loading throws UsageError when `options.key_in_checkpoint` returns a name twice.
  TrainingState& model(torch::nn::Module& module, ModelStateOptions options);
  /// The same for a module that Python has exported (torch::jit::load()), which is kept alive. A
  /// checkpoint of it loads into an equal module in C++, and the other way round.
  /// @throws UsageError also for a default-constructed module
  TrainingState& model(const torch::jit::Module& module, const std::string& name = "model");
  TrainingState& model(const torch::jit::Module& module, ModelStateOptions options);
  template <class M>
  TrainingState& model(const torch::nn::ModuleHolder<M>& holder,
                       const std::string& name = "model") {
    return model(static_cast<torch::nn::Module&>(*holder.ptr()), name);
  }
  template <class M>
  TrainingState& model(const torch::nn::ModuleHolder<M>& holder, ModelStateOptions options) {
    return model(static_cast<torch::nn::Module&>(*holder.ptr()), std::move(options));
  }
  template <std::derived_from<torch::nn::Module> M>
  TrainingState& model(const std::shared_ptr<M>& module, const std::string& name = "model") {
    return model(checked(module.get()), name);
  }
  template <std::derived_from<torch::nn::Module> M>
  TrainingState& model(const std::shared_ptr<M>& module, ModelStateOptions options) {
    return model(checked(module.get()), std::move(options));
  }
  /// State, options of each group (learning rates) and defaults of any of LibTorch's optimizers.
  /// The overloads below handle the wrappers. Saving and loading throw CheckpointError for an
  /// optimizer that a ShardedOptimizer wraps, because the wrapper has its state.
  TrainingState& optimizer(torch::optim::Optimizer& optimizer,
                           const std::string& name = "optimizer");
  /// The same for the wrapped optimizer.
  TrainingState& optimizer(DistributedOptimizer& optimizer, const std::string& name = "optimizer");
  /// Each rank saves its part of the state. Loads the state of any optimizer of the same type,
  /// sharded or not, from any number of ranks. While loading, each rank has the complete state.
  TrainingState& optimizer(ShardedOptimizer& optimizer, const std::string& name = "optimizer");
  /// The number of steps of a scheduler (StepLR, or one of the program's own). The learning rate
  /// belongs to the optimizer.
  TrainingState& scheduler(torch::optim::LRScheduler& scheduler,
                           const std::string& name = "scheduler");
  /// The scheduler's best value, and its numbers of steps, bad steps and remaining cooldown steps.
  TrainingState& scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler,
                           const std::string& name = "scheduler");
  TrainingState& scaler(GradScaler& scaler, const std::string& name = "scaler");
  /// Epoch, and the number of its samples that all ranks have drawn. Any number of ranks can load
  /// it.
  TrainingState& sampler(DistributedSampler& sampler, const std::string& name = "sampler");
  /// Epoch, and the number of its samples that the program has used on all ranks. Any number of
  /// ranks can load it.
  template <class Dataset>
  TrainingState& loader(DataLoader<Dataset>& loader, const std::string& name = "loader") {
    return progress(loader.progress(), name);
  }
  /// LibTorch's default random streams on the CPU and on hvd::device(), saved for each rank. If
  /// more ranks load them, a new rank r seeds its stream from r and from the stream of rank r
  /// modulo the former number of ranks.
  TrainingState& random(const std::string& name = "random");
  /// The same for one generator.
  TrainingState& random(at::Generator generator, const std::string& name);
  /// The same for all streams of a seed. Shared streams remain shared.
  TrainingState& random(const RandomStreams& streams, const std::string& name = "streams");
  /// A variable of any type that broadcast_object() takes. All ranks load the first rank's value.
  template <class T>
  TrainingState& value(const std::string& name, T& variable) {
    return add(name, std::make_shared<libtorch::ValueItem<T>>(variable, /*per_rank=*/false));
  }
  /// The same, but each rank saves and loads its own value. If more ranks load it, the new ones
  /// keep their values.
  template <class T>
  TrainingState& value_per_rank(const std::string& name, T& variable) {
    return add(name, std::make_shared<libtorch::ValueItem<T>>(variable, /*per_rank=*/true));
  }
  /// The values of a metric since its last reset(), on every rank. At another number of ranks the
  /// first rank loads the values of all, so that compute() returns the same.
  TrainingState& metric(Metric& metric, const std::string& name);
  /// Any object of the program, saved and loaded by functions that write it to an archive and read
  /// it. All ranks load the first rank's. `load` is called when all other items have been checked;
  /// if it throws, items that were loaded before it remain changed. @throws UsageError also for an
  /// empty function
  TrainingState& custom(const std::string& name,
                        std::function<void(torch::serialize::OutputArchive&)> save,
                        std::function<void(torch::serialize::InputArchive&)> load);

  /// An item and its name.
  struct Entry {
    std::string name;
    std::shared_ptr<libtorch::StateItem> item;
  };
  const std::vector<Entry>& entries() const noexcept { return entries_; }

 private:
  friend struct libtorch::AcceleratorCore;

  TrainingState& add(const std::string& name, std::shared_ptr<libtorch::StateItem> item);
  /// @throws UsageError for a null pointer
  static torch::nn::Module& checked(torch::nn::Module* module);
  TrainingState& progress(std::shared_ptr<libtorch::LoaderProgress> progress,
                          const std::string& name);

  std::vector<Entry> entries_;
};

/// @}

}  // namespace hvd
