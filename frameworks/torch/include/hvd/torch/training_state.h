#pragma once

#include <ATen/core/Generator.h>
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

class DistributedOptimizer;
class DistributedSampler;
class GradScaler;
class Metric;
class RandomStreams;
class ShardedOptimizer;
template <class Dataset>
class DataLoader;

namespace libtorch {

class LoaderProgress;

/// One thing that a checkpoint holds. Not thread-safe.
class StateItem {
 public:
  virtual ~StateItem() = default;
  /// What it is; only bytes of the same kind are loaded into it.
  virtual std::string kind() const = 0;
  /// Each rank has its own; otherwise the first rank's is everybody's.
  virtual bool per_rank() const { return false; }
  /// What ranks that save it together must have in common, for people; empty: nothing is compared.
  virtual std::string in_common() const { return {}; }
  /// Appends its bytes.
  virtual void encode(ObjectWriter& writer) const = 0;
  /// Takes what encode() has made. Checks it and changes nothing: that does the function which it
  /// returns, which must not fail for what decode() could have noticed. @throws what a user should
  /// read.
  virtual std::function<void()> decode(std::string_view bytes) = 0;
  /// For a rank (its number) of which there was none when the checkpoint was saved. @param bytes
  /// another rank's
  virtual std::function<void()> decode_for_new_rank(std::string_view bytes, int rank) {
    (void)rank;
    return decode(bytes);
  }
  /// Another number of ranks than have saved it loads all of their parts by decode_shards().
  virtual bool merges() const { return false; }
  /// It also takes what the ranks have saved of a sharded optimizer.
  virtual bool takes_shards() const { return false; }
  /// As decode(). @param shards of every rank that there was, in their order
  virtual std::function<void()> decode_shards(const std::vector<std::string_view>& shards) {
    return decode(shards.front());
  }
  /// Gives every rank of the job what `root_rank` has. Collective. @throws on every rank, or on
  /// none
  virtual void broadcast(int root_rank, const std::string& name);
  /// The same for what is not each rank's own. Collective.
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
    decode_object<T>(bytes);  // that it is one
    return [] {};
  }

 private:
  T& value_;
  const bool per_rank_;
};

}  // namespace libtorch

/// How a model is loaded.
struct ModelStateOptions {
  std::string name = "model";
  /// false: a tensor of the model that the checkpoint does not have, or has with another shape or
  /// dtype, stays as it is, and tensors of the checkpoint that the model does not have are passed
  /// over. The first rank warns and names them. For a model with a new head.
  bool strict = true;
  /// From the name of a parameter or buffer in this model to its name in the checkpoint, for a
  /// model whose modules have been renamed. It is not used when the model is saved. Names that it
  /// gives must differ. Empty: the same names.
  std::function<std::string(const std::string&)> key_in_checkpoint = {};
};

/// What a checkpoint holds, by name:
///
///     hvd::TrainingState state;
///     state.model(net).optimizer(optimizer).sampler(sampler).random().value("epoch", epoch);
///
/// Refers to what it is given, which must outlive it; a module that is owned by a shared_ptr or a
/// module holder is kept alive. Every rank names the same things in the same order. A name occurs
/// once; two models need names of their own. Copies refer to the same things. Not thread-safe.
class TrainingState {
 public:
  /// Parameters and buffers, by their names in the module. Loading copies into the tensors that are
  /// there. @throws UsageError, as all of these, for a name that is empty or taken.
  TrainingState& model(torch::nn::Module& module, const std::string& name = "model");
  /// @throws UsageError also when names that `options.key_in_checkpoint` gives are equal, on
  /// loading
  TrainingState& model(torch::nn::Module& module, ModelStateOptions options);
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
  /// A wrapper is taken as what it is. Saving and loading throw CheckpointError for an optimizer
  /// that a ShardedOptimizer wraps, which has its state.
  TrainingState& optimizer(torch::optim::Optimizer& optimizer,
                           const std::string& name = "optimizer");
  /// That of the wrapped optimizer.
  TrainingState& optimizer(DistributedOptimizer& optimizer, const std::string& name = "optimizer");
  /// Each rank saves its part of the state. Loads what was saved of any optimizer of the same type,
  /// sharded or not, at any number of ranks; while it loads each rank has all of it.
  TrainingState& optimizer(ShardedOptimizer& optimizer, const std::string& name = "optimizer");
  /// How many steps a scheduler (StepLR, or one of the program's own) has made; the learning rate
  /// is the optimizer's.
  TrainingState& scheduler(torch::optim::LRScheduler& scheduler,
                           const std::string& name = "scheduler");
  /// The best value, the numbers of steps, of bad steps and of steps of cooldown that are left.
  TrainingState& scheduler(torch::optim::ReduceLROnPlateauScheduler& scheduler,
                           const std::string& name = "scheduler");
  TrainingState& scaler(GradScaler& scaler, const std::string& name = "scaler");
  /// Epoch, and how many samples of it all ranks have drawn; goes on at any number of ranks.
  TrainingState& sampler(DistributedSampler& sampler, const std::string& name = "sampler");
  /// Epoch, and how many samples of it the program has used, on all ranks; goes on at any number of
  /// ranks.
  template <class Dataset>
  TrainingState& loader(DataLoader<Dataset>& loader, const std::string& name = "loader") {
    return progress(loader.progress(), name);
  }
  /// LibTorch's own random streams of this rank, on the CPU and on hvd::device(). Each rank has its
  /// own. Loaded by more ranks than there were, rank r of those that are new takes a stream of its
  /// own, seeded by r and by the stream that rank r modulo the former number had.
  TrainingState& random(const std::string& name = "random");
  /// The same for one generator.
  TrainingState& random(at::Generator generator, const std::string& name);
  /// The same for all streams of a seed; those that ranks share stay shared.
  TrainingState& random(const RandomStreams& streams, const std::string& name = "streams");
  /// A variable, of any type that broadcast_object() takes. The first rank's is everybody's.
  template <class T>
  TrainingState& value(const std::string& name, T& variable) {
    return add(name, std::make_shared<libtorch::ValueItem<T>>(variable, /*per_rank=*/false));
  }
  /// The same, of which each rank has its own. Loaded by more ranks than there were, those that are
  /// new keep what they have.
  template <class T>
  TrainingState& value_per_rank(const std::string& name, T& variable) {
    return add(name, std::make_shared<libtorch::ValueItem<T>>(variable, /*per_rank=*/true));
  }
  /// What a metric has taken in since its last reset(), on every rank. Loaded by another number of
  /// ranks, its first rank takes what all had, so that compute() gives the same.
  TrainingState& metric(Metric& metric, const std::string& name);
  /// An object of the program's own, by functions that write it to an archive and read it. The
  /// first rank's is every rank's. `load` is called when everything else has been checked; what it
  /// throws leaves what was loaded before it. @throws UsageError for an empty function
  TrainingState& custom(const std::string& name,
                        std::function<void(torch::serialize::OutputArchive&)> save,
                        std::function<void(torch::serialize::InputArchive&)> load);

  struct Entry {
    std::string name;
    std::shared_ptr<libtorch::StateItem> item;
  };
  const std::vector<Entry>& entries() const noexcept { return entries_; }

 private:
  TrainingState& add(const std::string& name, std::shared_ptr<libtorch::StateItem> item);
  /// @throws UsageError for a null pointer
  static torch::nn::Module& checked(torch::nn::Module* module);
  TrainingState& progress(std::shared_ptr<libtorch::LoaderProgress> progress,
                          const std::string& name);

  std::vector<Entry> entries_;
};

}  // namespace hvd
