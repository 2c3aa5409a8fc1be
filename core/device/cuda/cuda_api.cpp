#include "device/cuda/cuda_api.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "base/expect.h"
#include "base/mutex.h"
#include "device/cuda/driver.h"
#include "device/cuda/kernels.h"
#include "hvd/error.h"

namespace hvd::device {
namespace {

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // or it would be reported again by whatever the program calls next
  throw Error(std::string("CUDA: ") + call + " failed: " + cudaGetErrorString(result) + " (" +
              cudaGetErrorName(result) + ")");
}

/// For calls that cannot report: an error that stayed would be taken for that of the next launch.
void forget(cudaError_t result) noexcept {
  if (result != cudaSuccess) cudaGetLastError();
}

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t event_of(EventHandle event) { return static_cast<cudaEvent_t>(event.handle); }

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

class CudaApi final : public Api {
 public:
  int device_count() noexcept override {
    int count = 0;
    if (Driver::get() == nullptr || cudaGetDeviceCount(&count) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return count;
  }

  DeviceInfo info(int device) override {
    cudaDeviceProp properties = {};
    char bus_id[32] = {};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    check(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device), "cudaDeviceGetPCIBusId");
    return {properties.name,  bus_id,           properties.multiProcessorCount,
            properties.major, properties.minor, properties.totalGlobalMem};
  }

  void enter(int device) override {
    const Driver* const driver = Driver::get();
    if (driver == nullptr)
      throw Error("CUDA: there is no driver (libcuda.so.1); install one, or use CPU tensors");
    driver->push(context_of(*driver, device));
  }
  void leave() noexcept override { Driver::get()->pop(); }

  Stream create_stream() override {
    int lowest = 0;
    int highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest),
          "cudaStreamCreateWithPriority");
    return {stream};
  }
  void destroy_stream(Stream stream) noexcept override {
    forget(cudaStreamDestroy(stream_of(stream)));
  }

  EventHandle create_event() override {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return {event};
  }
  void destroy_event(EventHandle event) noexcept override {
    forget(cudaEventDestroy(event_of(event)));
  }
  void record(EventHandle event, Stream stream) override {
    check(cudaEventRecord(event_of(event), stream_of(stream)), "cudaEventRecord");
  }
  void wait(Stream stream, EventHandle event) override {
    check(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "cudaStreamWaitEvent");
  }
  bool reached(EventHandle event) override {
    const cudaError_t result = cudaEventQuery(event_of(event));
    if (result == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(result, "cudaEventQuery");
    return true;
  }
  bool capturing(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t result = cudaStreamIsCapturing(stream_of(stream), &status);
    if (result == cudaErrorStreamCaptureImplicit) {  // the default stream, while one that waits for
                                                     // it is being captured
      cudaGetLastError();
      return true;
    }
    check(result, "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  void synchronize(Stream stream) override {
    check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
  }

  std::byte* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* memory) noexcept override { forget(cudaFree(memory)); }
  std::byte* allocate_pinned(std::size_t bytes) override {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc");
    return static_cast<std::byte*>(memory);
  }
  void release_pinned(std::byte* memory) noexcept override { forget(cudaFreeHost(memory)); }
  void pin(std::byte* memory, std::size_t bytes) override {
    check(cudaHostRegister(memory, bytes, cudaHostRegisterPortable), "cudaHostRegister");
  }
  void unpin(std::byte* memory) noexcept override { forget(cudaHostUnregister(memory)); }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes, Direction direction,
            Stream stream) override {
    const cudaMemcpyKind kind = direction == Direction::kToDevice ? cudaMemcpyHostToDevice
                                : direction == Direction::kToHost ? cudaMemcpyDeviceToHost
                                                                  : cudaMemcpyDeviceToDevice;
    check(cudaMemcpyAsync(to, from, bytes, kind, stream_of(stream)), "cudaMemcpyAsync");
  }
  void run(const CopyLaunch& launch, Stream stream) override {
    check(launch_copy(launch, multiprocessors(), stream_of(stream)), "the batched copy's launch");
  }
  void fill(std::byte* to, std::size_t count, std::size_t element_bytes, std::uint64_t pattern,
            Stream stream) override {
    HVD_EXPECT(reinterpret_cast<std::uintptr_t>(to) % element_bytes == 0, "aligned to an element");
    check(launch_fill(to, count, element_bytes, pattern, multiprocessors(), stream_of(stream)),
          "the fill's launch");
  }

 private:
  CUctx_st* context_of(const Driver& driver, int device) {
    const auto index = static_cast<std::size_t>(device);
    const MutexLock lock(mutex_);
    if (contexts_.size() <= index) contexts_.resize(index + 1);
    if (contexts_[index] == nullptr) contexts_[index] = driver.primary_context(device);
    return contexts_[index];
  }

  int multiprocessors() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    const auto index = static_cast<std::size_t>(device);
    const MutexLock lock(mutex_);
    if (multiprocessors_.size() <= index) multiprocessors_.resize(index + 1);
    if (multiprocessors_[index] == 0) {
      check(
          cudaDeviceGetAttribute(&multiprocessors_[index], cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
    }
    return multiprocessors_[index];
  }

  Mutex mutex_;
  std::vector<CUctx_st*> contexts_ HVD_GUARDED_BY(mutex_);   // by device
  std::vector<int> multiprocessors_ HVD_GUARDED_BY(mutex_);  // by device
};

}  // namespace

std::shared_ptr<Api> make_cuda_api() { return std::make_shared<CudaApi>(); }

std::string describe_cuda() {
  const std::string runtime = "runtime " + version_text(CUDART_VERSION);
  int driver = 0;
  if (Driver::get() == nullptr || cudaDriverGetVersion(&driver) != cudaSuccess) {
    return runtime + ", no driver (libcuda.so.1 was not found or does not start), 0 devices";
  }
  std::string text = runtime + ", driver " + version_text(driver);
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess) {
    cudaGetLastError();
    return text + ", 0 devices: " + cudaGetErrorString(result);
  }
  text += ", " + std::to_string(count) + (count == 1 ? " device" : " devices");
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties = {};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    text += (device == 0 ? ": " : ", ") + std::string(properties.name) + " (sm_" +
            std::to_string(properties.major) + std::to_string(properties.minor) + ")";
  }
  return text;
}

}  // namespace hvd::device
