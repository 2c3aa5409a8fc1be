#include "gpu/bench/pack_call.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include "device/context.h"
#include "device/cuda/cuda_api.h"

namespace hvd::bench {
namespace {

constexpr std::uint64_t kAlignment = 4;  ///< elements; 16 bytes, as in the runtime's buffer

void require(cudaError_t result, const char* what) {
  if (result != cudaSuccess)
    throw std::runtime_error(std::string("gpu_step_bench: ") + what + ": " +
                             cudaGetErrorString(result));
}

std::shared_ptr<device::Api> cuda() {
  auto api = device::make_cuda_api();
  if (api->device_count() == 0)
    throw std::runtime_error("gpu_step_bench: hvd finds no GPU: " + device::describe_cuda());
  return api;
}

}  // namespace

struct PackCall::State {
  State(int device, const std::vector<Tensor>& tensors, void* into, void* on)
      : api(cuda()),
        context(api, device),
        guard(*api, device),
        buffer(static_cast<std::byte*>(into)),
        stream{on} {
    std::vector<std::uint64_t> counts;
    for (const Tensor& tensor : tensors) counts.push_back(tensor.count);
    const std::vector<std::uint64_t> places = offsets(counts);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      pieces.push_back(
          {static_cast<std::byte*>(tensors[i].data), places[i] * sizeof(float), tensors[i].count});
    }
    require(cudaEventCreate(&begin), "cudaEventCreate");
    require(cudaEventCreate(&end), "cudaEventCreate");
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }

  const std::shared_ptr<device::Api> api;
  device::Context context;
  const device::DeviceGuard guard;
  std::byte* const buffer;
  const device::Stream stream;
  std::vector<device::Piece> pieces;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
};

std::vector<std::uint64_t> PackCall::offsets(const std::vector<std::uint64_t>& counts) {
  std::vector<std::uint64_t> places = {0};
  for (const std::uint64_t count : counts)
    places.push_back(places.back() + (count + kAlignment - 1) / kAlignment * kAlignment);
  return places;
}

PackCall::PackCall(int device, const std::vector<Tensor>& tensors, void* buffer, void* stream)
    : state_(std::make_unique<State>(device, tensors, buffer, stream)) {}
PackCall::~PackCall() = default;

void PackCall::run(double factor) {
  const device::CopyForm scaled{DataType::kFloat32, DataType::kFloat32, true};
  state_->context.copy_pieces(state_->pieces, scaled, state_->buffer, /*to_buffer=*/true, factor,
                              state_->stream);
}

PackCall::Times PackCall::time(int repeats, const std::function<void()>& call) {
  const auto stream = static_cast<cudaStream_t>(state_->stream.handle);
  require(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  require(cudaEventRecord(state_->begin, stream), "cudaEventRecord");
  const auto from = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) call();
  const double host =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - from).count();
  require(cudaEventRecord(state_->end, stream), "cudaEventRecord");
  require(cudaEventSynchronize(state_->end), "cudaEventSynchronize");
  float milliseconds = 0;
  require(cudaEventElapsedTime(&milliseconds, state_->begin, state_->end), "cudaEventElapsedTime");
  return {static_cast<double>(milliseconds) * 1000 / repeats, host / repeats};
}

}  // namespace hvd::bench
