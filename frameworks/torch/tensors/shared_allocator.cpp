#include "tensors/shared_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstddef>

#include "hvd/memory.h"

namespace hvd::libtorch {
namespace {

// What malloc would map and unmap each time. Smaller tensors are reduced in a common buffer anyway.
constexpr std::size_t kSmallest = std::size_t{64} << 10;

c10::Allocator& ordinary() {
  static c10::Allocator* const allocator = c10::GetDefaultCPUAllocator();
  return *allocator;
}

void release(void* data) {
  if (!free_shared_block(data)) ordinary().raw_deleter()(data);
}

/// Large tensors from shared memory, whose pages stay mapped when they are freed; small ones, and
/// what shared memory has no room for, from LibTorch's own allocator, which also says so when there
/// is no memory at all. As there, the context of a tensor's memory is its address. Thread-safe.
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

// Before the first tensor: those from another allocator live on, but are not shared.
const bool installed = [] {
  if (!shared_allocator_requested()) return false;
  if (!has_shared_memory()) {
    TORCH_WARN(
        "HVD_SHM_ALLOCATOR=1 has no effect: the system does not let this process have shared "
        "memory (HVD_LOG_LEVEL=debug says why)");
    return false;
  }
  ordinary();
  // Never destroyed: tensors may be freed after everything else.
  c10::SetCPUAllocator(new SharedAllocator, 1);
  return true;
}();

}  // namespace

bool shared_allocator_installed() noexcept { return installed; }

}  // namespace hvd::libtorch
