#include "device/cuda/cuda_api.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <vector>

#include "base/expect.h"
#include "base/mutex.h"
#include "base/text.h"
#include "device/cuda/kernels.h"
#include "hvd/error.h"

struct CUctx_st;

namespace hvd::device {
namespace {

/// Functions of the driver that have no counterpart in the runtime library. They are looked up when
/// the program runs, so that a program with CUDA support starts on hosts without a driver.
/// Thread-safe.
class Driver {
 public:
  /// The process's driver; null if no driver is installed.
  static const Driver* get();

  /// The device's primary context. It is retained until the process ends. @throws Error
  CUctx_st* primary_context(int device) const;
  /// Makes the context current for the calling thread until pop(), and switches the thread to the
  /// relaxed capture mode: Note [Captures]. Calls may nest. @throws Error
  void push(CUctx_st* context) const;
  void pop() const noexcept;

 private:
  Driver() = default;
  void check(int result, const char* call) const;

  int (*init_)(unsigned) = nullptr;
  int (*device_get_)(int*, int) = nullptr;
  int (*retain_)(CUctx_st**, int) = nullptr;
  int (*push_)(CUctx_st*) = nullptr;
  int (*pop_)(CUctx_st**) = nullptr;
  int (*exchange_capture_mode_)(int*) = nullptr;
  int (*error_string_)(int, const char**) = nullptr;
};

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

// Note [Captures]: while a stream is captured into a graph in CUDA's default mode, which LibTorch
// uses too, no thread of the process may query an event, allocate or free. Such a call fails and
// invalidates the capture. hvd makes these calls on its own threads and on the program's, for
// operations that were queued before the capture began, and never uses a stream that is being
// captured. Therefore each thread switches to the relaxed mode while it uses the device.
constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

thread_local int push_depth = 0;
thread_local int mode_outside = 0;

const Driver* Driver::get() {
  static const Driver* const instance = []() -> const Driver* {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    static Driver driver;
    const bool complete =
        find(library, "cuInit", driver.init_) && find(library, "cuDeviceGet", driver.device_get_) &&
        find(library, "cuDevicePrimaryCtxRetain", driver.retain_) &&
        find(library, "cuCtxPushCurrent_v2", driver.push_) &&
        find(library, "cuCtxPopCurrent_v2", driver.pop_) &&
        find(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode_) &&
        find(library, "cuGetErrorString", driver.error_string_);
    return complete && driver.init_(0) == 0 ? &driver : nullptr;
  }();
  return instance;
}

void Driver::check(int result, const char* call) const {
  if (result == 0) return;
  const char* description = nullptr;
  error_string_(result, &description);
  throw Error(text("CUDA: ", call, " failed with ", result, ": ",
                   description != nullptr ? description : "unknown error"));
}

CUctx_st* Driver::primary_context(int device) const {
  int handle = 0;
  CUctx_st* context = nullptr;
  check(device_get_(&handle, device), "cuDeviceGet");
  check(retain_(&context, handle), "cuDevicePrimaryCtxRetain");
  return context;
}

void Driver::push(CUctx_st* context) const {
  check(push_(context), "cuCtxPushCurrent");
  if (push_depth++ > 0) return;
  mode_outside = kRelaxed;
  // On failure the device has failed; its operations report that.
  if (exchange_capture_mode_(&mode_outside) != 0) mode_outside = 0;
}

void Driver::pop() const noexcept {
  if (--push_depth == 0) exchange_capture_mode_(&mode_outside);
  CUctx_st* popped = nullptr;
  pop_(&popped);
}

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the program's next call would return otherwise
  throw Error(text("CUDA: ", call, " failed: ", cudaGetErrorString(result), " (",
                   cudaGetErrorName(result), ")"));
}

/// Clears the error of a call that cannot throw, so that the next launch does not report it.
void forget(cudaError_t result) noexcept {
  if (result != cudaSuccess) cudaGetLastError();
}

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t event_of(EventHandle event) { return static_cast<cudaEvent_t>(event.handle); }

std::string version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

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
    // Returned for the default stream while a stream that synchronises with it is being captured.
    if (result == cudaErrorStreamCaptureImplicit) {
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
  const std::string runtime = text("runtime ", version_text(CUDART_VERSION));
  int driver = 0;
  if (Driver::get() == nullptr || cudaDriverGetVersion(&driver) != cudaSuccess) {
    return runtime + ", no driver (libcuda.so.1 was not found or does not start), 0 devices";
  }
  const std::string versions = text(runtime, ", driver ", version_text(driver));
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess) {
    cudaGetLastError();
    return text(versions, ", 0 devices: ", cudaGetErrorString(result));
  }
  std::string found = text(versions, ", ", count, count == 1 ? " device" : " devices");
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties = {};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    found += text(device == 0 ? ": " : ", ", properties.name, " (sm_", properties.major,
                  properties.minor, ")");
  }
  return found;
}

}  // namespace hvd::device
