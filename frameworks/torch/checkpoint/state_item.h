#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hvd/torch/data_loader.h"
#include "hvd/torch/grad_scaler.h"
#include "hvd/torch/metric.h"
#include "hvd/torch/random_streams.h"
#include "hvd/torch/sampler.h"
#include "hvd/torch/training_state.h"

namespace hvd::libtorch {

/// A module's parameters and buffers. Names, shapes and dtypes must be those that were saved.
class ModuleItem final : public StateItem {
 public:
  explicit ModuleItem(torch::nn::Module& module, ModelStateOptions options = {})
      : owner_(module.weak_from_this().lock()), module_(module), options_(std::move(options)) {}
  std::string kind() const override { return "model"; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;
  void broadcast(int root_rank, const std::string& name) override;

 private:
  std::string stored_name(const std::string& what, const std::string& key) const;

  std::shared_ptr<torch::nn::Module> owner_;  ///< null if it is not owned by a pointer
  torch::nn::Module& module_;
  const ModelStateOptions options_;
};

/// An optimizer, whose type and whose parameters' shapes must be those that were saved.
class OptimizerItem final : public StateItem {
 public:
  explicit OptimizerItem(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}
  std::string kind() const override { return "optimizer"; }
  void encode(ObjectWriter& writer) const override;
  /// What it returns leaves the optimizer as it was when it throws.
  std::function<void()> decode(std::string_view bytes) override;
  bool takes_shards() const override { return true; }
  std::function<void()> decode_shards(const std::vector<std::string_view>& shards) override;
  void broadcast(int root_rank, const std::string& name) override;

 private:
  torch::optim::Optimizer& optimizer_;
};

/// How many steps a scheduler has made.
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

/// By functions of the program.
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

/// A random stream, of which each rank has its own.
class GeneratorItem final : public StateItem {
 public:
  explicit GeneratorItem(at::Generator generator) : generator_(std::move(generator)) {}
  std::string kind() const override { return "random stream"; }
  bool per_rank() const override { return true; }
  void encode(ObjectWriter& writer) const override;
  std::function<void()> decode(std::string_view bytes) override;
  std::function<void()> decode_for_new_rank(std::string_view bytes, int rank) override;

  /// The seed of a rank that has no stream: differs by rank and by the other rank's stream.
  static std::uint64_t seed_for(std::string_view bytes, int rank);

 private:
  at::Generator generator_;
};

/// Streams by name, of which each rank has its own.
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

}  // namespace hvd::libtorch
