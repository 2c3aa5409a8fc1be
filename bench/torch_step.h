#pragma once

#include <mpi.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/model.h"
#include "bench/step_contender.h"

namespace hvd::bench {

/// The data from which every contender of a workload is built.
struct StepMaterial {
  WorkloadOptions options;
  std::vector<at::Tensor> values;
  int rank = 0;
  int size = 1;
  MPI_Comm peers = MPI_COMM_NULL;

  std::unique_ptr<Model> model() const { return make_model(options, values, rank); }
  std::unique_ptr<torch::optim::Optimizer> optimizer(const Model& model) const;
};

/// A step without any exchange. Subclasses override the parts in which they differ.
class TorchStep : public StepContender {
 public:
  TorchStep(std::string name, const StepMaterial& material);
  std::string name() const override { return name_; }
  void run() override;
  void rest() override { clear(); }
  std::optional<std::string> fault() override;

 protected:
  /// The expected gradients after run(). kSum: a program that calls MPI itself would divide the
  /// loss, which takes no extra time.
  enum class Result { kLocal, kSum, kMean };
  virtual Result result() const { return Result::kLocal; }

  virtual void clear() { optimizer_->zero_grad(); }
  virtual void before_backward() {}
  virtual void exchange() {}
  virtual void update() { optimizer_->step(); }

  const StepMaterial& material() const noexcept { return material_; }
  const std::vector<at::Tensor>& parameters() const noexcept { return model_->parameters(); }
  torch::optim::Optimizer& optimizer() noexcept { return *optimizer_; }

 private:
  std::optional<std::string> fault_of(std::size_t index, at::Tensor expected) const;

  const std::string name_;
  const StepMaterial& material_;
  const std::unique_ptr<Model> model_;
  const std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// c10d::Reducer, the engine of PyTorch's DistributedDataParallel, with gradients as views into its
/// buckets, over MPI.
/// @param chunk_bytes size of one MPI call; 0: one call per bucket
std::unique_ptr<StepContender> make_reducer_step(std::string name, const StepMaterial& material,
                                                 std::size_t chunk_bytes);

}  // namespace hvd::bench
