#include <hvd/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "bench/torch_reducer.h"
#include "gpu/bench/nccl_group.h"
#include "gpu/bench/step_contender.h"
#include "hvd/hvd.h"

namespace hvd::bench {
namespace {

using Tensors = std::vector<at::Tensor>;
using BackendType = c10d::ProcessGroup::BackendType;

/// A backend for one rank, whose allreduce changes no tensor and is complete on the current stream.
class NoExchange final : public c10d::Backend {
 public:
  NoExchange() : Backend(/*rank=*/0, /*size=*/1) {}
  const std::string getBackendName() const override { return "no-exchange"; }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                           const c10d::AllreduceOptions&) override {
    return work_done(tensors);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors,
                                           const c10d::BroadcastOptions&) override {
    return work_done(tensors);
  }
};

class ReducerTraining final : public TrainingContender {
 public:
  ReducerTraining(const std::string& name, const TrainingData& data,
                  c10::intrusive_ptr<c10d::Backend> backend, BackendType type)
      : TrainingContender(name, data),
        backend_(std::move(backend)),
        parameters_(model()->parameters()),
        reducer_(
            make_reducer(parameters_, make_group(backend_, type, data.images.device().type()))) {}
  ~ReducerTraining() override {
    reducer_.reset();
    backend_->shutdown();
  }

 protected:
  // LibTorch's zero_grad() refuses gradients that are views into buckets.
  void clear() override {
    for (const at::Tensor& parameter : parameters_) parameter.mutable_grad().reset();
  }
  // These are the calls of DistributedDataParallel's forward, except the broadcast of buffers,
  // which hvd does not do either.
  void before_backward() override {
    reducer_->rebuild_buckets();
    reducer_->prepare_for_backward({});
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const Tensors parameters_;
  std::unique_ptr<c10d::Reducer> reducer_;
};

/// A store in which the ranks of the job meet, served by rank 0. Collective.
c10::intrusive_ptr<c10d::Store> make_store() {
  if (hvd::size() == 1) return c10::make_intrusive<c10d::HashStore>();
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = hvd::rank() == 0;
  options.waitWorkers = false;
  c10::intrusive_ptr<c10d::TCPStore> served;
  if (options.isServer) served = c10::make_intrusive<c10d::TCPStore>("localhost", options);
  const std::string address = hvd::broadcast_object(std::string(host.data()));
  options.port = hvd::broadcast_object(served ? served->getPort() : std::uint16_t{0});
  if (served) return served;
  return c10::make_intrusive<c10d::TCPStore>(address, options);
}

}  // namespace

std::unique_ptr<TrainingContender> make_reducer_contender(const std::string& name,
                                                          const TrainingData& data) {
  if (name == "reducer-no-exchange") {
    if (hvd::size() != 1)
      throw std::runtime_error(
          "it exchanges no data, so it is measured with one rank only, and "
          "this job has " +
          std::to_string(hvd::size()));
    return std::make_unique<ReducerTraining>(name, data, c10::make_intrusive<NoExchange>(),
                                             BackendType::CUSTOM);
  }
  if (name != "ddp")
    throw std::invalid_argument("gpu_step_bench: there is no contender '" + name +
                                "'; expected ddp or reducer-no-exchange");
  if (!data.images.is_cuda()) throw std::runtime_error("NCCL works on GPUs only");
  return std::make_unique<ReducerTraining>(
      name, data, make_nccl_group(make_store(), hvd::rank(), hvd::size()), BackendType::NCCL);
}

}  // namespace hvd::bench
