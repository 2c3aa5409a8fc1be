#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>

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
  /// It also takes what the ranks have saved of a sharded optimizer.
  virtual bool takes_shards() const { return false; }
  /// As decode(). @param shards of every rank that there was, in their order
  virtual std::function<void()> decode_shards(const std::vector<std::string_view>& shards) {
    return decode(shards.front());
  }
  /// Gives every rank of the job what `root_rank` has. Collective. @throws on every rank, or on
  /// none
  virtual void broadcast(int root_rank, const std::string& name);
};

template <class T>
class ValueItem final : public StateItem {
 public:
  explicit ValueItem(T& value) : value_(value) {}
  std::string kind() const override { return std::string("value ") + typeid(T).name(); }
  void encode(ObjectWriter& writer) const override { ObjectCodec<T>::write(writer, value_); }
  std::function<void()> decode(std::string_view bytes) override {
    auto decoded = std::make_shared<T>(decode_object<T>(bytes));
    return [this, decoded] { value_ = std::move(*decoded); };
  }

 private:
  T& value_;
};

}  // namespace libtorch

/// What a checkpoint holds, by name:
///
///     hvd::TrainingState state;
///     state.model(net).optimizer(optimizer).sampler(sampler).random().value("epoch", epoch);
///
/// Refers to what it is given, which must outlive it. Every rank names the same things in the same
/// order. A name occurs once; two models need names of their own. Copies refer to the same things.
/// Not thread-safe.
class TrainingState {
 public:
  /// Parameters and buffers, by their names in the module. Loading copies into the tensors that are
  /// there. @throws UsageError, as all of these, for a name that is empty or taken.
  TrainingState& model(torch::nn::Module& module, const std::string& name = "model");
  template <class M>
  TrainingState& model(const torch::nn::ModuleHolder<M>& holder,
                       const std::string& name = "model") {
    return model(static_cast<torch::nn::Module&>(*holder.ptr()), name);
  }
  /// State, options of each group (learning rates) and defaults of any of LibTorch's optimizers.
  TrainingState& optimizer(torch::optim::Optimizer& optimizer,
                           const std::string& name = "optimizer");
  /// That of the wrapped optimizer.
  TrainingState& optimizer(DistributedOptimizer& optimizer, const std::string& name = "optimizer");
  /// Each rank saves its part of the state. Loads what was saved of any optimizer of the same type,
  /// sharded or not, at any number of ranks; while it loads each rank has all of it.
  TrainingState& optimizer(ShardedOptimizer& optimizer, const std::string& name = "optimizer");
  /// How many steps a scheduler (StepLR, or one of the program's own) has made; the learning rate
  /// is the optimizer's. LibTorch's ReduceLROnPlateauScheduler is none of these, and shows nothing
  /// of what it remembers.
  TrainingState& scheduler(torch::optim::LRScheduler& scheduler,
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
    return add(name, std::make_shared<libtorch::ValueItem<T>>(variable));
  }

  struct Entry {
    std::string name;
    std::shared_ptr<libtorch::StateItem> item;
  };
  const std::vector<Entry>& entries() const noexcept { return entries_; }

 private:
  TrainingState& add(const std::string& name, std::shared_ptr<libtorch::StateItem> item);
  TrainingState& progress(std::shared_ptr<libtorch::LoaderProgress> progress,
                          const std::string& name);

  std::vector<Entry> entries_;
};

}  // namespace hvd
