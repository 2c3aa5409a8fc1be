#pragma once

#include "hvd/device.h"

namespace hvd::libtorch {

/// LibTorch's allocator for GPUs. hvd::torch passes it to hvd::use_device_memory() when it is
/// loaded. Initialises the allocator if the program has not done so. Needs no header of CUDA. If
/// LibTorch has no allocator for GPUs, the allocated blocks are empty.
DeviceMemory device_memory();

}  // namespace hvd::libtorch
