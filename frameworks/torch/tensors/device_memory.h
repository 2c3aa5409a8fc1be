#pragma once

#include "hvd/device.h"

namespace hvd::libtorch {

/// LibTorch's memory of GPUs, which hvd::torch gives to hvd::use_device_memory() when it is loaded.
/// No header of CUDA is needed. Where LibTorch has no allocator for GPUs, its blocks are empty.
DeviceMemory device_memory();

}  // namespace hvd::libtorch
