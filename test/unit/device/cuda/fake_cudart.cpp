#include "unit/device/cuda/fake_cudart.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace hvd::testing {
namespace {

thread_local int capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
thread_local std::vector<CUcontext> contexts;

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
}

/// Records a failure as the last error, like the runtime library, and returns the result.
cudaError_t say(int result) {
  if (result != cudaSuccess) fake_cudart().last_error = result;
  return static_cast<cudaError_t>(result);
}

/// Checks a call: it needs a context, and an unsafe one fails during a global capture.
/// @param unsafe whether a capture forbids the call
cudaError_t call(const char* name, bool unsafe, int result = cudaSuccess) {
  FakeCudart& fake = fake_cudart();
  const std::lock_guard lock(fake.mutex);
  if (contexts.empty()) fake.without_context.emplace_back(name);
  if (unsafe && fake.capture_under_way && capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL) {
    fake.spoiled_by.emplace_back(name);
    return say(cudaErrorStreamCaptureUnsupported);
  }
  return say(result);
}

int read(int FakeCudart::*member) {
  FakeCudart& fake = fake_cudart();
  const std::lock_guard lock(fake.mutex);
  return fake.*member;
}

}  // namespace

FakeCudart& fake_cudart() {
  static auto* const fake = new FakeCudart;
  return *fake;
}
int fake_capture_mode() { return capture_mode; }
std::size_t fake_context_depth() { return contexts.size(); }

}  // namespace hvd::testing

using hvd::testing::call;
using hvd::testing::contexts;
using hvd::testing::FakeCudart;

extern "C" {

// --- The driver ---
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* handle, int device) {
  *handle = device;
  return device < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  const std::lock_guard lock(hvd::testing::fake_cudart().mutex);
  hvd::testing::fake_cudart().retained.insert(device);
  *context = hvd::testing::context_of(device);
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  contexts.push_back(context);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  const int before = hvd::testing::capture_mode;
  hvd::testing::capture_mode = *mode;
  *mode = static_cast<CUstreamCaptureMode>(before);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the driver";
  return CUDA_SUCCESS;
}

// --- The runtime library ---
cudaError_t cudaGetLastError() {
  FakeCudart& fake = hvd::testing::fake_cudart();
  const std::lock_guard lock(fake.mutex);
  return static_cast<cudaError_t>(std::exchange(fake.last_error, 0));
}
const char* cudaGetErrorString(cudaError_t) { return "an error of CUDA"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfATest"; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = contexts.empty()
                ? 0
                : static_cast<int>(reinterpret_cast<std::uintptr_t>(contexts.back()) - 1);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  std::memset(properties, 0, sizeof *properties);
  return device < 2 ? cudaSuccess : hvd::testing::say(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  std::strncpy(text, "0000:1b:00.0", static_cast<std::size_t>(size));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return call("cudaDeviceGetStreamPriorityRange", false);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  *stream = reinterpret_cast<cudaStream_t>(0x10);
  return call("cudaStreamCreateWithPriority", false);
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return call("cudaStreamDestroy", false, hvd::testing::read(&FakeCudart::free));
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return call("cudaStreamSynchronize", true); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return call("cudaStreamWaitEvent", false);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  const int answer = hvd::testing::read(&FakeCudart::is_capturing);
  *status = answer == 1 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return call("cudaStreamIsCapturing", false, answer > 1 ? answer : cudaSuccess);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(0x20);
  return call("cudaEventCreateWithFlags", false);
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
  return call("cudaEventDestroy", false, hvd::testing::read(&FakeCudart::free));
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return call("cudaEventRecord", false); }
cudaError_t cudaEventQuery(cudaEvent_t) {
  return call("cudaEventQuery", true, hvd::testing::read(&FakeCudart::event_query));
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = std::malloc(bytes);
  return call("cudaMalloc", true);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return call("cudaHostAlloc", true);
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return call("cudaFree", true, hvd::testing::read(&FakeCudart::free));
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return call("cudaFreeHost", true, hvd::testing::read(&FakeCudart::free));
}
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) {
  return call("cudaHostRegister", true);
}
cudaError_t cudaHostUnregister(void*) {
  return call("cudaHostUnregister", true, hvd::testing::read(&FakeCudart::free));
}
cudaError_t cudaMemcpyAsync(void*, const void*, std::size_t, cudaMemcpyKind, cudaStream_t) {
  return call("cudaMemcpyAsync", false);
}

}  // extern "C"
