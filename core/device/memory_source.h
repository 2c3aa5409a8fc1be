#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "device/api.h"
#include "device/event_pool.h"
#include "hvd/device.h"
#include "hvd/status.h"

namespace hvd::device {

/// Device memory with shared ownership. Destroying the last copy frees it, which may block on the
/// device.
struct OwnedMemory {
  std::shared_ptr<std::byte> memory = nullptr;
  EventPtr usable_after = nullptr;  ///< null: at once
};

/// The source of a GPU's memory: the framework's allocator if there is one, else the device's
/// library. Its calls may block on the device, so use it in Context::run_aside(). Thread-safe.
class MemorySource : public std::enable_shared_from_this<MemorySource> {
 public:
  MemorySource(std::shared_ptr<Api>, int device, std::shared_ptr<EventPool>,
               DeviceMemory framework);

  /// Allocates memory aligned to 256 bytes, with arbitrary contents. If memory is short, it empties
  /// the framework's cache and tries again.
  /// @throws Error that states the requested size and what to do
  OwnedMemory allocate(std::size_t bytes);
  /// Returns a pointer whose last copy calls `free` with the device current.
  std::shared_ptr<std::byte> owned(std::byte* memory, std::function<void(std::byte*)> free);
  /// Calls `make` with the device current, and again after emptying the framework's cache if it
  /// throws because memory is short.
  void with_room(std::size_t bytes, const std::function<void()>& make);

 private:
  OwnedMemory allocate_once(std::size_t bytes);

  const std::shared_ptr<Api> api_;
  const int device_;
  const std::shared_ptr<EventPool> events_;
  const DeviceMemory framework_;
};

}  // namespace hvd::device
