// Measures one launch that packs or unpacks the gradients of a model, in comparison with a copy of
// as many bytes within the device and with one copy per tensor. Writes a line of JSON per
// measurement. Usage: gpu_pack_bench [MODEL] [SECONDS]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "bench/parameter_sets.h"
#include "device/context.h"
#include "device/cuda/cuda_api.h"

namespace {

using hvd::DataType;
using hvd::device::CopyForm;
using hvd::device::Piece;

constexpr int kWarmUp = 10;
constexpr int kRepeats = 20;  ///< between two timestamps

/// Medians in microseconds per call: on the device, and on the host until the call is queued.
struct Times {
  double device = 0;
  double host = 0;
};

void require(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "gpu_pack_bench: %s: %s\n", what, cudaGetErrorString(result));
  std::exit(1);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

Times measure(cudaStream_t stream, double seconds, const std::function<void()>& call) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  require(cudaEventCreate(&begin), "cudaEventCreate");
  require(cudaEventCreate(&end), "cudaEventCreate");
  for (int i = 0; i < kWarmUp; ++i) call();
  require(cudaStreamSynchronize(stream), "warming up");
  std::vector<double> device;
  std::vector<double> host;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (device.size() < 20 || std::chrono::steady_clock::now() < limit) {
    require(cudaEventRecord(begin, stream), "cudaEventRecord");
    const auto from = std::chrono::steady_clock::now();
    for (int i = 0; i < kRepeats; ++i) call();
    host.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - from).count() /
        kRepeats);
    require(cudaEventRecord(end, stream), "cudaEventRecord");
    require(cudaEventSynchronize(end), "measuring");
    float milliseconds = 0;
    require(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    device.push_back(static_cast<double>(milliseconds) * 1000 / kRepeats);
  }
  return {median(device), median(host)};
}

void report(const std::string& model, const char* what, double bytes, const Times& times,
            double copy_device) {
  std::printf(
      "{\"model\": \"%s\", \"what\": \"%s\", \"device_us\": %.2f, \"host_us\": %.2f, "
      "\"read_and_written_gb_s\": %.1f, \"of_copy\": %.3f}\n",
      model.c_str(), what, times.device, times.host, bytes / times.device / 1000,
      copy_device / times.device);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string model = argc > 1 ? argv[1] : "resnet50";
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  const auto api = hvd::device::make_cuda_api();
  if (api->device_count() == 0) {
    std::printf("skipped: no GPU: %s\n", hvd::device::describe_cuda().c_str());
    return 0;
  }
  hvd::device::Context context(api, 0);
  const hvd::device::DeviceGuard guard(*api, 0);
  const hvd::device::OwnedStream owned(context);
  const auto stream = static_cast<cudaStream_t>(owned.get().handle);

  std::vector<Piece> pieces;
  std::size_t bytes = 0;
  for (const auto& shape : hvd::bench::parameter_set(model).shapes) {
    std::uint64_t count = 1;
    for (const auto size : shape) count *= static_cast<std::uint64_t>(size);
    pieces.push_back({api->allocate(count * sizeof(float)), bytes, count});
    bytes += (count * sizeof(float) + 15) / 16 * 16;
  }
  std::byte* const buffer = api->allocate(bytes);
  std::byte* const other = api->allocate(bytes);
  api->fill(other, bytes, 1, 0, owned.get());

  const auto traffic = 2 * static_cast<double>(bytes);
  const Times copy = measure(stream, seconds, [&] {
    api->copy(buffer, other, bytes, hvd::device::Direction::kOnDevice, owned.get());
  });
  report(model, "one copy of all bytes", traffic, copy, copy.device);
  const auto pack = [&](const CopyForm& form, bool to_buffer) {
    return measure(stream, seconds,
                   [&] { context.copy_pieces(pieces, form, buffer, to_buffer, 0.5, owned.get()); });
  };
  const CopyForm plain{};
  const CopyForm scaled{DataType::kFloat32, DataType::kFloat32, true};
  const CopyForm cast{DataType::kFloat32, DataType::kBFloat16, true};
  report(model, "pack", traffic, pack(plain, true), copy.device);
  report(model, "pack and scale", traffic, pack(scaled, true), copy.device);
  report(model, "scale and unpack", traffic, pack(scaled, false), copy.device);
  // The offsets are the same, so a 16-bit buffer uses half of each tensor's space.
  report(model, "pack, scale and cast to bf16", traffic * 3 / 4, pack(cast, true), copy.device);
  const Times each = measure(stream, seconds, [&] {
    for (const Piece& piece : pieces) {
      api->copy(buffer + piece.offset, piece.tensor, piece.count * sizeof(float),
                hvd::device::Direction::kOnDevice, owned.get());
    }
  });
  report(model, "a copy per tensor", traffic, each, copy.device);
  return 0;
}
