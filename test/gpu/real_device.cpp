#include <cuda_runtime_api.h>

#include <stdexcept>

#include "gpu/program_device.h"

namespace hvd::testing {
namespace {

void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}
cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

bool ProgramDevice::prepare(int) {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

void ProgramDevice::use(int device) { check(cudaSetDevice(device), "cudaSetDevice"); }

std::byte* ProgramDevice::allocate(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  return static_cast<std::byte*>(memory);
}

void ProgramDevice::release(std::byte* memory) { cudaFree(memory); }

void* ProgramDevice::create_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

void ProgramDevice::destroy_stream(void* stream) { cudaStreamDestroy(stream_of(stream)); }

void ProgramDevice::copy_in(std::byte* to, const void* from, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_of(stream)),
        "cudaMemcpyAsync");
}

void ProgramDevice::copy_out(void* to, const std::byte* from, std::size_t bytes, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(stream)),
        "cudaMemcpyAsync");
  synchronize(stream);
}

void ProgramDevice::synchronize(void* stream) {
  check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
}

void ProgramDevice::hang(void*) { throw std::runtime_error("a real GPU is not made to hang"); }

void ProgramDevice::begin_capture(void* stream, Capture capture) {
  const auto mode = capture == Capture::kAllThreads ? cudaStreamCaptureModeGlobal
                                                    : cudaStreamCaptureModeThreadLocal;
  check(cudaStreamBeginCapture(stream_of(stream), mode), "cudaStreamBeginCapture");
}

bool ProgramDevice::end_capture(void* stream) {
  cudaGraph_t graph = nullptr;
  const bool sound = cudaStreamEndCapture(stream_of(stream), &graph) == cudaSuccess;
  if (graph != nullptr) cudaGraphDestroy(graph);
  return sound;
}

std::vector<std::string> ProgramDevice::drain_faults() { return {}; }

std::size_t ProgramDevice::max_floats() { return std::size_t{1} << 24; }

std::chrono::seconds ProgramDevice::time_limit() { return std::chrono::seconds(15); }

}  // namespace hvd::testing
