// Implements the device functions with LibTorch's own CUDA, for tests that also run on a simulated
// GPU.
#include <c10/core/impl/VirtualGuardImpl.h>

#include "torch/support/cuda_device.h"

namespace hvd::testing {

int cuda_devices() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
}

std::vector<std::string> take_cuda_faults() { return {}; }

c10::Stream other_cuda_stream(c10::DeviceIndex device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
      .getStreamFromGlobalPool({c10::DeviceType::CUDA, device});
}

}  // namespace hvd::testing
