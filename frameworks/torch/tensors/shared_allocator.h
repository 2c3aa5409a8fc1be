#pragma once

namespace hvd::libtorch {

/// Returns whether LibTorch's CPU tensors are in memory that the ranks of this host share
/// (HVD_SHM_ALLOCATOR=1 when the library was loaded). Gradients are then reduced in place. See
/// docs/torch.md.
bool shared_allocator_installed() noexcept;

}  // namespace hvd::libtorch
