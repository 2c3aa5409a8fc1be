#include "tensors/allocators.h"

#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "hvd/error.h"
#include "hvd/memory.h"

namespace hvd::libtorch {
namespace {

/// Translates an error of LibTorch into one of hvd, without a backtrace.
template <class Function>
auto without_backtrace(const Function& function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    throw Error(error.what_without_backtrace());
  }
}

// LibTorch initialises its allocator with its first operation on a GPU. If a program has only
// wrapped memory from its own cudaMalloc in tensors, there was no such operation, and the allocator
// would refuse to allocate.
c10::Allocator* initialised_allocator() {
  c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CUDA);
  auto* const caching = dynamic_cast<c10::DeviceAllocator*>(allocator);
  if (caching != nullptr && !caching->initialized())
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  return allocator;
}

// The allocator manages memory per stream: an allocation belongs to the current stream. A stream of
// LibTorch's pool is used here, because on the default stream hvd would have to wait for all
// computations of the program, and could not record an event during a graph's capture. While hvd is
// initialised, it allocates from one thread and for one device, so the stream stays the same and
// freed memory is reused.
DeviceBlock allocate_block(int index, std::size_t bytes) {
  return without_backtrace([&]() -> DeviceBlock {
    c10::Allocator* const allocator = initialised_allocator();
    if (allocator == nullptr) return {};
    const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
    thread_local const c10::Stream stream =
        c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(device);
    const c10::StreamGuard guard(stream);
    const auto owner = std::make_shared<c10::DataPtr>(allocator->allocate(bytes));
    return DeviceBlock{{owner, static_cast<std::byte*>(owner->get())}, stream.native_handle()};
  });
}

void empty_allocators_cache(int) {
  auto* const allocator =
      dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
  if (allocator != nullptr) without_backtrace([&] { allocator->emptyCache(); });
}

[[maybe_unused]] const bool given_to_hvd = [] {
  use_device_memory(device_memory());
  return true;
}();

}  // namespace

DeviceMemory device_memory() {
  return {.allocate = &allocate_block, .empty_cache = &empty_allocators_cache};
}

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
/// throws when there is no memory. As in that allocator, the context of a tensor's memory is its
/// address. Thread-safe.
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
