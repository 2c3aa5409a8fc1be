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

/// The error text without LibTorch's backtrace.
template <class Function>
auto without_backtrace(const Function& function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    throw Error(error.what_without_backtrace());
  }
}

// The allocator assigns memory to the current stream. With the default stream hvd would have to
// wait for all work of the program, and no event can be recorded there during the capture of a
// graph. So hvd uses a stream from the pool. It allocates from one thread and for one device while
// it is initialised, and memory that is freed under one stream is found again under it.
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
