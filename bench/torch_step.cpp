#include "bench/torch_step.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/version.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>

#include "bench/peers.h"
#include "hvd/hvd.h"
#include "hvd/torch/distributed_optimizer.h"

namespace hvd::bench {
namespace {

void sum_gradient(const at::Tensor& gradient, MPI_Comm communicator, std::size_t chunk_bytes) {
  allreduce_sum({gradient.mutable_data_ptr<float>(), static_cast<std::size_t>(gradient.numel())},
                communicator, chunk_bytes);
}

class OneRank final : public TorchStep {
 public:
  using TorchStep::TorchStep;
  bool on_one_rank() const override { return true; }
};

class Hvd final : public TorchStep {
 public:
  Hvd(std::string name, const StepMaterial& material, bool views)
      : TorchStep(std::move(name), material),
        // Does not compare the parameters between ranks: the contenders share them, and the
        // contender without an exchange makes them differ.
        distributed_(optimizer(), named_parameters(),
                     {.gradient_as_bucket_view = views, .check_every = 0}) {}

  void rest() override {
    clear();
    // Waits until hvd's thread sleeps. It polls for more work for a short time first.
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  }

 protected:
  Result result() const override { return Result::kMean; }
  void clear() override { distributed_.zero_grad(); }
  void update() override { distributed_.step(); }

 private:
  NamedParameters named_parameters() const {
    NamedParameters named;
    for (const at::Tensor& parameter : parameters())
      named.insert(std::to_string(named.size()), parameter);
    return named;
  }

  DistributedOptimizer distributed_;
};

/// Exchanges one tensor after the other with MPI.
class MpiPerTensor final : public TorchStep {
 public:
  /// @param chunk_bytes size of one call; 0: one call per tensor
  MpiPerTensor(std::string name, const StepMaterial& material, std::size_t chunk_bytes)
      : TorchStep(std::move(name), material), chunk_bytes_(chunk_bytes) {}

 protected:
  Result result() const override { return Result::kSum; }
  void exchange() override {
    for (const at::Tensor& parameter : parameters())
      sum_gradient(parameter.grad(), material().peers, chunk_bytes_);
  }

 private:
  const std::size_t chunk_bytes_;
};

/// All gradients are views into one buffer, which is exchanged in one call.
class MpiFlat final : public TorchStep {
 public:
  MpiFlat(std::string name, const StepMaterial& material)
      : TorchStep(std::move(name), material), flat_(at::zeros({material.options.set.elements()})) {
    std::int64_t first = 0;
    for (const at::Tensor& parameter : parameters()) {
      parameter.mutable_grad() = flat_.narrow(0, first, parameter.numel()).view(parameter.sizes());
      first += parameter.numel();
    }
  }

 protected:
  Result result() const override { return Result::kSum; }
  void clear() override { flat_.zero_(); }
  void exchange() override { sum_gradient(flat_, material().peers, 0); }

 private:
  at::Tensor flat_;
};

class TorchWorkload final : public Workload {
 public:
  TorchWorkload(const WorkloadOptions& options, const Session& session)
      : material_{options, initial_values(options.set), session.rank(), session.size(),
                  session.peers()} {}

  std::unique_ptr<StepContender> contender(const std::string& name) override {
    if (name == "one") return std::make_unique<OneRank>(name, material_);
    if (name == "alone") return std::make_unique<TorchStep>(name, material_);
    if (name == "hvd") return std::make_unique<Hvd>(name, material_, /*views=*/true);
    if (name == "hvd-copy") return std::make_unique<Hvd>(name, material_, /*views=*/false);
    if (name == "mpi-chunked") return std::make_unique<MpiPerTensor>(name, material_, kChunkBytes);
    if (name == "mpi") return std::make_unique<MpiPerTensor>(name, material_, 0);
    if (name == "mpi-flat") return std::make_unique<MpiFlat>(name, material_);
    if (name == "reducer") return make_reducer_step(name, material_, 0);
    if (name == "reducer-chunked") return make_reducer_step(name, material_, kChunkBytes);
    throw std::invalid_argument("there is no contender '" + name + "'");
  }

 private:
  const StepMaterial material_;
};

}  // namespace

std::unique_ptr<torch::optim::Optimizer> StepMaterial::optimizer(const Model& model) const {
  // The rate is so small that the values hardly change during a run, so that every step computes
  // for the same time.
  constexpr double kLearningRate = 1e-6;
  if (options.update == Update::kSgd)
    return std::make_unique<torch::optim::SGD>(model.parameters(), kLearningRate);
  return std::make_unique<torch::optim::AdamW>(
      model.parameters(), torch::optim::AdamWOptions(kLearningRate).weight_decay(0));
}

TorchStep::TorchStep(std::string name, const StepMaterial& material)
    : name_(std::move(name)),
      material_(material),
      model_(material.model()),
      optimizer_(material.optimizer(*model_)) {}

void TorchStep::run() {
  clear();
  at::Tensor loss = model_->loss();
  before_backward();
  loss.backward();
  exchange();
  update();
}

std::optional<std::string> TorchStep::fault() {
  const auto seed = static_cast<std::uint64_t>(material_.rank) + 1;  // for dropout
  const auto reference = material_.model();
  at::manual_seed(seed);
  reference->loss().backward();
  at::manual_seed(seed);
  run();
  std::optional<std::string> first;
  for (std::size_t i = 0; i < parameters().size(); ++i) {
    const auto found = fault_of(i, reference->parameters()[i].grad());
    if (!first) first = found;  // other ranks wait inside fault_of(), so it is always called
  }
  return first;
}

std::optional<std::string> TorchStep::fault_of(std::size_t index, at::Tensor expected) const {
  if (result() != Result::kLocal) sum_gradient(expected, material_.peers, kChunkBytes);
  if (result() == Result::kMean) expected.div_(material_.size);
  const at::Tensor& found = parameters()[index].grad();
  const std::string where =
      "gradient " + std::to_string(index) + " on rank " + std::to_string(material_.rank);
  if (!found.defined()) return where + " is missing";
  // A contender may add in another order. A real error is far larger than this tolerance.
  constexpr double kTolerance = 1e-5;
  const double error = (found - expected).abs().max().item<double>();
  const double largest = expected.abs().max().item<double>();
  if (error <= kTolerance * largest) return std::nullopt;
  return where + " is wrong by " + std::to_string(error) + ", its largest element is " +
         std::to_string(largest);
}

std::vector<std::string> step_contender_names() {
  return {"one", "alone",    "hvd",     "hvd-copy",       "mpi-chunked",
          "mpi", "mpi-flat", "reducer", "reducer-chunked"};
}

std::unique_ptr<Workload> make_workload(const WorkloadOptions& options, const Session& session) {
  return std::make_unique<TorchWorkload>(options, session);
}

Json describe_torch() {
  return {{"torch", TORCH_VERSION}, {"torch_threads", at::get_num_threads()}};
}

void share_out_threads(int threads) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  at::set_num_threads(threads > 0 ? threads : std::max(1, cores / local_size()));
}

}  // namespace hvd::bench
