#include "device/memory_source.h"

#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "hvd/error.h"

namespace hvd::device {

MemorySource::MemorySource(std::shared_ptr<Api> api, int device, std::shared_ptr<EventPool> events,
                           DeviceMemory framework)
    : api_(std::move(api)),
      device_(device),
      events_(std::move(events)),
      framework_(std::move(framework)) {}

OwnedMemory MemorySource::allocate(std::size_t bytes) {
  OwnedMemory made;
  with_room(bytes, [&] { made = allocate_once(bytes); });
  return made;
}

void MemorySource::with_room(std::size_t bytes, const std::function<void()>& make) {
  const DeviceGuard guard(*api_, device_);
  std::string reason;
  try {
    return make();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  try {
    if (framework_.empty_cache) {
      HVD_LOG(kDebug) << "device " << device_ << " is short of memory for " << bytes
                      << " bytes, emptying the framework's cache: " << reason;
      framework_.empty_cache(device_);
      return make();
    }
  } catch (const std::exception& error) {
    reason = error.what();
  }
  throw Error("device " + std::to_string(device_) + " has no memory for a buffer of " +
              std::to_string(bytes) + " bytes (" + std::to_string(bytes >> 20) + " MiB): " +
              reason + "; a smaller batch or model, or a smaller HVD_FUSION_THRESHOLD, makes room");
}

// Note [When a buffer is usable]: a stream-ordered allocator may return memory that earlier work of
// its stream still uses, because it expects the caller to use that stream too. hvd uses its own
// streams, so these first wait for that point of the allocator's stream. Freeing needs no such
// wait, because hvd frees memory only after the host has seen the device finish with it.
OwnedMemory MemorySource::allocate_once(std::size_t bytes) {
  if (framework_.allocate) {
    DeviceBlock block = framework_.allocate(device_, bytes);
    if (block.memory != nullptr) return {std::move(block.memory), events_->record({block.stream})};
  }
  return {owned(api_->allocate(bytes), [api = api_](std::byte* mine) { api->release(mine); })};
}

std::shared_ptr<std::byte> MemorySource::owned(std::byte* memory,
                                               std::function<void(std::byte*)> free) {
  return {memory, [source = shared_from_this(), free = std::move(free)](std::byte* mine) {
            try {
              const DeviceGuard guard(*source->api_, source->device_);
              free(mine);
            } catch (const std::exception& error) {
              HVD_LOG(kDebug) << "memory of device " << source->device_ << " was not freed: "
                              << error.what();  // the device has failed, which others report
            }
          }};
}

}  // namespace hvd::device
