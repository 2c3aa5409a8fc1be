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

}  // namespace

const Driver* Driver::get() {
  static const Driver* const instance = []() -> const Driver* {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    static Driver driver;
    const bool complete = find(library, "cuInit", driver.init_) && find(library, "cuDeviceGet", driver.device_get_) &&
                          find(library, "cuDevicePrimaryCtxRetain", driver.retain_) &&
                          find(library, "cuCtxPushCurrent_v2", driver.push_) && find(library, "cuCtxPopCurrent_v2", driver.pop_) &&
                          find(library, "cuGetErrorString", driver.error_string_);
    return complete && driver.init_(0) == 0 ? &driver : nullptr;
  }();
  return instance;
}

void Driver::check(int result, const char* call) const {
  if (result == 0) return;
  const char* text = nullptr;
  error_string_(result, &text);
  throw Error(std::string("CUDA: ") + call + " failed with " + std::to_string(result) + ": " + (text != nullptr ? text : "unknown error"));
}

CUctx_st* Driver::primary_context(int device) const {
  int handle = 0;
  CUctx_st* context = nullptr;
  check(device_get_(&handle, device), "cuDeviceGet");
  check(retain_(&context, handle), "cuDevicePrimaryCtxRetain");
  return context;
}

void Driver::push(CUctx_st* context) const { check(push_(context), "cuCtxPushCurrent"); }

void Driver::pop() const noexcept {
  CUctx_st* popped = nullptr;
  pop_(&popped);
}

}  // namespace hvd::device
