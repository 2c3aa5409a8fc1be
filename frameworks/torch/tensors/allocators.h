#pragma once

#include "hvd/device.h"

namespace hvd::libtorch {

/// LibTorch's allocator for GPUs. hvd::torch passes it to hvd::use_device_memory() when it is
/// loaded. Initialises the allocator if the program has not done so. Needs no header of CUDA. If
/// LibTorch has no allocator for GPUs, the allocated blocks are empty.
DeviceMemory device_memory();

/// Returns whether LibTorch's CPU tensors are in memory that the ranks of this host share
/// (HVD_SHM_ALLOCATOR=1 when the library was loaded). Gradients are then reduced in place. See
/// docs/torch.md.
bool shared_allocator_installed() noexcept;

}  // namespace hvd::libtorch
