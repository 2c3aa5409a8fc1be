#include "device/cuda/driver.h"

#include <dlfcn.h>

#include "hvd/error.h"

namespace hvd::device {
namespace {

template <class Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

// Note [Captures]: a capture in CUDA's default mode, which is LibTorch's too, forbids every thread
// of the process what might disturb it: to ask whether an event has been reached, to allocate, to
// free. Who does so anyway gets an error and spoils the capture. hvd's engine does all of that on
// threads of its own and of the program, for operations that were queued before the capture began;
// it never touches a stream that is being captured. So its threads take themselves out of that rule
// while they work with the device.
constexpr int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

thread_local int depth = 0;
thread_local int mode_outside = 0;

}  // namespace

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
  const char* text = nullptr;
  error_string_(result, &text);
  throw Error(std::string("CUDA: ") + call + " failed with " + std::to_string(result) + ": " +
              (text != nullptr ? text : "unknown error"));
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
  if (depth++ > 0) return;
  mode_outside = kRelaxed;
  if (exchange_capture_mode_(&mode_outside) != 0)
    mode_outside = 0;  // the device has failed, which others report
}

void Driver::pop() const noexcept {
  if (--depth == 0) exchange_capture_mode_(&mode_outside);
  CUctx_st* popped = nullptr;
  pop_(&popped);
}

}  // namespace hvd::device
