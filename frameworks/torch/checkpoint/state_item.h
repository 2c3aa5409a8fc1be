#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/torch/data_loader.h"
#include "hvd/torch/grad_scaler.h"
#include "hvd/torch/metric.h"
#include "hvd/torch/parameters.h"
#include "hvd/torch/random_streams.h"
#include "hvd/torch/safetensors.h"
#include "hvd/torch/sampler.h"
#include "hvd/torch/sharded_optimizer.h"
#include "hvd/torch/training_state.h"

namespace hvd::libtorch {

/// A module's parameters and buffers. Names, shapes and dtypes must equal the saved ones.
class ModuleItem final : public StateItem {
 public:
  explicit ModuleItem(torch::nn::Module& module, ModelStateOptions options = {})
      : owner_(module.weak_from_this().lock()), module_(&module), options_(std::move(options)) {}
  /// For a module that Python has exported. @throws UsageError if it is default-constructed
  ModuleItem(const torch::jit::Module& module, ModelStateOptions options);
  std::string kind() const override { return "model"; }
  bool has_replicated_tensors() const override { return true; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;
  void broadcast(int root_rank, const std::string& name) override;

  NamedParameters parameters() const;
  NamedParameters buffers() const;
  StateDict state_dict() const;
  std::string module_name() const;

 private:
  std::string stored_name(const std::string& what, const std::string& key) const;

  std::shared_ptr<torch::nn::Module> owner_;   ///< null if the module is not owned by a shared_ptr
  torch::nn::Module* const module_ = nullptr;  ///< null for an exported module
  const std::optional<torch::jit::Module> script_;
  const ModelStateOptions options_;
};

/// The kinds of an optimizer's stored state: LibTorch's archive, the elements of all parameters, or
/// one rank's part of a sharded optimizer.
inline constexpr const char* kWholeOptimizer = "optimizer";
inline constexpr const char* kElementwiseOptimizer = "elementwise optimizer";
inline constexpr const char* kShardedOptimizer = "sharded optimizer";

/// An optimizer, whose type and parameters' shapes must equal the saved ones.
class OptimizerItem final : public StateItem {
 public:
  explicit OptimizerItem(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}
  std::string kind() const override { return kWholeOptimizer; }
  std::string stored_kind() const override;
  bool has_replicated_tensors() const override { return true; }
  void encode(ObjectWriter& writer) const override;
  /// For kWholeOptimizer. The returned function leaves the optimizer unchanged when it throws.
  std::function<void()> decode(std::string_view bytes) override;
  bool takes_shards() const override { return true; }
  std::function<void()> decode_shards(const std::vector<std::string_view>& shards) override;
  void broadcast(int root_rank, const std::string& name) override;
  torch::optim::Optimizer& optimizer() const noexcept { return optimizer_; }

 private:
  torch::optim::Optimizer& optimizer_;
};

/// The number of steps of a scheduler.
class SchedulerItem final : public StateItem {
 public:
  explicit SchedulerItem(torch::optim::LRScheduler& scheduler) : scheduler_(scheduler) {}
  std::string kind() const override { return "scheduler"; }
  std::string in_common() const override;
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;

 private:
  torch::optim::LRScheduler& scheduler_;
};

class PlateauItem final : public StateItem {
 public:
  explicit PlateauItem(torch::optim::ReduceLROnPlateauScheduler& scheduler)
      : scheduler_(scheduler) {}
  std::string kind() const override { return "plateau scheduler"; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;

 private:
  torch::optim::ReduceLROnPlateauScheduler& scheduler_;
};

/// An object that the program's own functions save and load.
class CustomItem final : public StateItem {
 public:
  using Save = std::function<void(torch::serialize::OutputArchive&)>;
  using Load = std::function<void(torch::serialize::InputArchive&)>;
  CustomItem(Save save, Load load) : save_(std::move(save)), load_(std::move(load)) {}
  std::string kind() const override { return "custom"; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;

 private:
  Save save_;
  Load load_;
};

/// The values that a rank has added to a metric.
class MetricItem final : public StateItem {
 public:
  explicit MetricItem(Metric& metric) : metric_(metric) {}
  std::string kind() const override;
  bool per_rank() const override { return true; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;
  bool merges() const override { return true; }
  std::function<void()> decode_shards(const std::vector<std::string_view>& shards) override;

 private:
  Metric& metric_;
};

class ScalerItem final : public StateItem {
 public:
  explicit ScalerItem(GradScaler& scaler) : scaler_(scaler) {}
  std::string kind() const override { return "scaler"; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;

 private:
  GradScaler& scaler_;
};

class SamplerItem final : public StateItem {
 public:
  explicit SamplerItem(DistributedSampler sampler) : sampler_(std::move(sampler)) {}
  std::string kind() const override { return "sampler"; }
  std::string in_common() const override;
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;

 private:
  DistributedSampler sampler_;  ///< copies share one state
};

class LoaderItem final : public StateItem {
 public:
  explicit LoaderItem(std::shared_ptr<LoaderProgress> progress) : progress_(std::move(progress)) {}
  std::string kind() const override { return "data loader"; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;

 private:
  std::shared_ptr<LoaderProgress> progress_;
};

/// A random stream of each rank; with LibTorch's default one on the CPU, the position of
/// CommitSeeds.
class GeneratorItem final : public StateItem {
 public:
  explicit GeneratorItem(at::Generator generator) : generator_(std::move(generator)) {}
  std::string kind() const override { return "random stream"; }
  bool per_rank() const override { return true; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;
  std::function<void()> decode_for_new_rank(std::string_view bytes, int rank) override;

  /// The seed of a new rank, computed from its number and another rank's stream.
  static std::uint64_t seed_for(std::string_view bytes, int rank);

 private:
  bool is_default() const;
  std::size_t state_size() const;
  /// Removes the position from the end of `bytes` and returns it, if there is one.
  std::optional<std::uint64_t> without_position(std::string_view& bytes) const;

  at::Generator generator_;
};

/// The named random streams of each rank.
class StreamTableItem final : public StateItem {
 public:
  explicit StreamTableItem(std::shared_ptr<StreamTable> table) : table_(std::move(table)) {}
  std::string kind() const override { return "random streams"; }
  bool per_rank() const override { return true; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override {
    return table_->decode(bytes, /*as_new_rank=*/false);
  }
  std::function<void()> decode_for_new_rank(std::string_view bytes, int /*rank*/) override {
    return table_->decode(bytes, /*as_new_rank=*/true);
  }
  void broadcast_shared(int root_rank, const std::string& name) override;

 private:
  std::shared_ptr<StreamTable> table_;
};

/// A rank's part of a sharded optimizer's state. Loading gives each rank the complete state, which
/// is then sharded.
class ShardedOptimizerItem final : public StateItem {
 public:
  explicit ShardedOptimizerItem(ShardedOptimizer& optimizer) : optimizer_(optimizer) {}
  std::string kind() const override { return kShardedOptimizer; }
  bool per_rank() const override { return true; }
  void encode(ObjectWriter& writer) const override;
  /// For the bytes of an OptimizerItem.
  std::function<void()> decode(std::string_view bytes) override;
  bool takes_shards() const override { return true; }
  void broadcast(int root_rank, const std::string& name) override;
  std::function<void()> decode_shards(const std::vector<std::string_view>& shards) override;
  ShardedOptimizer& optimizer() const noexcept { return optimizer_; }

 private:
  ShardedOptimizer& optimizer_;
};

}  // namespace hvd::libtorch
