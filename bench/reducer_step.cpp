#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <utility>

#include "bench/peers.h"
#include "bench/torch_reducer.h"
#include "bench/torch_step.h"

namespace hvd::bench {
namespace {

using Tensors = std::vector<at::Tensor>;

/// MPI as a c10d backend. The calls block. On a host whose cores are all busy, a separate thread
/// such as that of PyTorch's MPI backend would only take a core away.
class PlainMpi final : public c10d::Backend {
 public:
  PlainMpi(const StepMaterial& material, std::size_t chunk_bytes)
      : Backend(material.rank, material.size),
        communicator_(material.peers),
        chunk_bytes_(chunk_bytes) {}

  const std::string getBackendName() const override { return "plain-mpi"; }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) override {
    for (at::Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.is_contiguous() && options.reduceOp == c10d::ReduceOp::SUM,
                  "hvd-bench: only contiguous sums");
      allreduce_sum({tensor.mutable_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())},
                    communicator_, chunk_bytes_);
    }
    return work_done(tensors);
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors,
                                           const c10d::BroadcastOptions& options) override {
    for (at::Tensor& tensor : tensors) {
      MPI_Bcast(tensor.mutable_data_ptr(), static_cast<int>(tensor.nbytes()), MPI_BYTE,
                static_cast<int>(options.rootRank), communicator_);
    }
    return work_done(tensors);
  }

 private:
  MPI_Comm communicator_;
  std::size_t chunk_bytes_;
};

class ReducerStep final : public TorchStep {
 public:
  ReducerStep(std::string name, const StepMaterial& material, std::size_t chunk_bytes)
      : TorchStep(std::move(name), material),
        reducer_(make_reducer(
            parameters(),
            make_group(c10::make_intrusive<PlainMpi>(material, chunk_bytes),
                       c10d::ProcessGroup::BackendType::CUSTOM, c10::DeviceType::CPU))) {}

 protected:
  Result result() const override { return Result::kMean; }
  // LibTorch's zero_grad() refuses gradients that are views into buckets.
  void clear() override {
    for (const at::Tensor& parameter : parameters()) parameter.mutable_grad().reset();
  }
  // Makes the same calls as DistributedDataParallel's forward().
  void before_backward() override {
    reducer_->rebuild_buckets();
    reducer_->prepare_for_backward({});
  }

 private:
  std::unique_ptr<c10d::Reducer> reducer_;
};

}  // namespace

std::unique_ptr<StepContender> make_reducer_step(std::string name, const StepMaterial& material,
                                                 std::size_t chunk_bytes) {
  return std::make_unique<ReducerStep>(std::move(name), material, chunk_bytes);
}

}  // namespace hvd::bench
