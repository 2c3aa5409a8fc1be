#include "tensors/shared_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstddef>

#include "hvd/memory.h"

namespace hvd::libtorch {
namespace {

// malloc maps and unmaps blocks of this size. Smaller tensors are reduced in a common buffer.
constexpr std::size_t kSmallest = std::size_t{64} << 10;

c10::Allocator& ordinary() {
  static c10::Allocator* const allocator = c10::GetDefaultCPUAllocator();
  return *allocator;
}

void release(void* data) {
  if (!free_shared_block(data)) ordinary().raw_deleter()(data);
}

/// Allocates large tensors in shared memory, whose pages remain mapped when they are freed. Small
/// ones, and those that do not fit in shared memory, come from LibTorch's own allocator, which also
/// throws when there is no memory. As there, the context of a tensor's memory is its address.
/// Thread-safe.
class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    std::byte* const data = bytes < kSmallest ? nullptr : allocate_shared_block(bytes);
    if (data == nullptr) return ordinary().allocate(bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

// Set before the first tensor is made, since tensors of another allocator are not shared.
const bool installed = [] {
  if (!shared_allocator_requested()) return false;
  if (!has_shared_memory()) {
    TORCH_WARN(
        "HVD_SHM_ALLOCATOR=1 has no effect: this process cannot get shared "
        "memory (HVD_LOG_LEVEL=debug logs the reason)");
    return false;
  }
  ordinary();
  // Never destroyed, since tensors may be freed after all other objects.
  c10::SetCPUAllocator(new SharedAllocator, 1);
  return true;
}();

}  // namespace

bool shared_allocator_installed() noexcept { return installed; }

}  // namespace hvd::libtorch
