#include "tensors/device_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "hvd/error.h"

namespace hvd::libtorch {
namespace {

/// As hvd's errors are, without a backtrace.
template <class Function>
auto without_backtrace(const Function& function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    throw Error(error.what_without_backtrace());
  }
}

// The allocator keeps memory by the stream that is current when it gives it out. Under the default
// one hvd would have to wait for all that the program computes, and a graph's capture forbids to
// record an event there; so it is one from the pool. hvd asks from one thread and for one device as
// long as it is initialized, and under one stream what has gone back is found again.
DeviceBlock allocate_block(int index, std::size_t bytes) {
  c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CUDA);
  if (allocator == nullptr) return {};
  return without_backtrace([&] {
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

}  // namespace hvd::libtorch
