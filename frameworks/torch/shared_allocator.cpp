#include "shared_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <memory>
#include <string_view>

#include "hvd/memory.h"

namespace hvd::libtorch {
namespace {

// What malloc would map and unmap each time. Smaller tensors are reduced in a common buffer anyway.
constexpr std::size_t kSmallest = std::size_t{64} << 10;

/// Large tensors from shared memory, whose pages stay mapped when they are freed; small ones from LibTorch's own allocator. Thread-safe.
class SharedAllocator final : public c10::Allocator {
 public:
  explicit SharedAllocator(c10::Allocator* ordinary) : ordinary_(ordinary) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kSmallest) return ordinary_->allocate(bytes);
    auto owner = std::make_unique<Owner>(allocate_shared(bytes, ReleasedPages::kKept));
    void* const data = owner->get();
    return {data, owner.release(), &release, c10::Device(c10::DeviceType::CPU)};
  }
  // Memory is freed through its owner, not through its address.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  using Owner = std::shared_ptr<std::byte>;
  static void release(void* owner) { delete static_cast<Owner*>(owner); }

  c10::Allocator* const ordinary_;
};

bool wanted() {
  const char* const value = std::getenv("HVD_SHM_ALLOCATOR");
  return value != nullptr && std::string_view(value) == "1";
}

// Before the first tensor: those from another allocator live on, but are not shared.
const bool installed = [] {
  if (!wanted()) return false;
  // Never destroyed: tensors may be freed after everything else.
  c10::SetCPUAllocator(new SharedAllocator(c10::GetDefaultCPUAllocator()), 1);
  return true;
}();

}  // namespace

bool shared_allocator_installed() noexcept { return installed; }

}  // namespace hvd::libtorch
