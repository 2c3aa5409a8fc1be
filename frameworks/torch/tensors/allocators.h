#pragma once

#include <cstddef>
#include <vector>

#include "hvd/device.h"

namespace hvd::libtorch {

/// LibTorch's allocator for GPUs. hvd::torch passes it to hvd::use_device_memory() when it is
/// loaded. Initialises the allocator if the program has not done so. Needs no header of CUDA. If
/// LibTorch has no allocator for GPUs, the allocated blocks are empty.
DeviceMemory device_memory();

/// Tensors of at least this size are allocated separately in memory that ranks share. malloc maps
/// and unmaps blocks of this size, and reducing them in place saves more than a separate operation
/// costs.
inline constexpr std::size_t kSmallestShared = std::size_t{128} << 10;

/// Places gradients in memory that the ranks of this host share, so that they are reduced where
/// autograd has put them. While an object exists, LibTorch allocates tensors there that backward()
/// makes and that have one of the given sizes. HVD_SHM_ALLOCATOR=1 has that effect for all large
/// tensors, and 0 prevents it. See docs/decisions/0045-gradients-in-shared-memory.md.
///
/// Any thread may run backward() meanwhile. The objects themselves are not thread-safe.
class SharedGradients {
 public:
  /// Has no effect.
  SharedGradients() = default;
  /// @param sizes in bytes; those below kSmallestShared are left out
  explicit SharedGradients(std::vector<std::size_t> sizes);
  SharedGradients(SharedGradients&&) noexcept;
  SharedGradients& operator=(SharedGradients&&) noexcept;
  /// Returns the unused pages of the shared memory to the system with the last object.
  ~SharedGradients();

  /// False if there are no such sizes, if the system has no shared memory, or if the program has
  /// replaced the allocator.
  bool active() const noexcept { return active_; }

 private:
  std::vector<std::size_t> sizes_;  ///< the sizes that this object has registered
  bool active_ = false;
};

}  // namespace hvd::libtorch
