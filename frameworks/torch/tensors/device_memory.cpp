#include "tensors/device_memory.h"

#include <ATen/Context.h>
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

/// Translates an error of LibTorch into one of hvd, without a backtrace.
template <class Function>
auto without_backtrace(const Function& function) {
  try {
    return function();
  } catch (const c10::Error& error) {
    throw Error(error.what_without_backtrace());
  }
}

// LibTorch initialises its allocator with its first operation on a GPU. A program that has only
// wrapped memory of its own cudaMalloc in tensors has had no such operation, and the allocator
// would refuse to allocate.
c10::Allocator* initialised_allocator() {
  c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CUDA);
  auto* const caching = dynamic_cast<c10::DeviceAllocator*>(allocator);
  if (caching != nullptr && !caching->initialized())
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  return allocator;
}

// The allocator keeps memory per stream, the one that is current at the allocation. A stream of
// LibTorch's pool is used here, because on the default stream hvd would have to wait for all that
// the program computes, and could not record an event during a graph's capture. While it is
// initialized, hvd allocates from one thread and for one device, so the stream stays the same and
// freed memory is found again.
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

}  // namespace hvd::libtorch
