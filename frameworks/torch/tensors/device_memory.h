#pragma once

#include "hvd/device.h"

namespace hvd::libtorch {

/// LibTorch's allocator of GPU memory. hvd::torch passes it to hvd::use_device_memory() when the
/// library is loaded. Needs no CUDA header. If LibTorch has no GPU allocator, it returns empty
/// blocks.
DeviceMemory device_memory();

}  // namespace hvd::libtorch
