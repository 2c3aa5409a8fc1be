#pragma once

namespace hvd::libtorch {

/// LibTorch's CPU tensors lie in memory that the ranks of this host share (HVD_SHM_ALLOCATOR=1 when
/// the library was loaded), so that gradients are reduced where autograd has put them. See
/// docs/torch.md.
bool shared_allocator_installed() noexcept;

}  // namespace hvd::libtorch
