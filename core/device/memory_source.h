#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "device/api.h"
#include "device/event_pool.h"
#include "hvd/device.h"
#include "hvd/status.h"

namespace hvd::device {

/// Memory of the device, for whoever holds the pointer. When the last copy goes the memory is
/// freed, which may wait for the device.
struct OwnedMemory {
  std::shared_ptr<std::byte> memory = nullptr;
  EventPtr usable_after = nullptr;  ///< null: at once
};

/// Where a GPU's memory comes from: the framework's allocator, else the device's library. Its calls
/// may wait for the device, so they belong into Context::run_aside(). Thread-safe.
class MemorySource : public std::enable_shared_from_this<MemorySource> {
 public:
  MemorySource(std::shared_ptr<Api>, int device, std::shared_ptr<EventPool>,
               DeviceMemory framework);

  /// 256-byte aligned, contents arbitrary. When memory is short the framework's cache is emptied,
  /// and it is tried again. @throws Error that says how much was asked for, and what to do
  OwnedMemory allocate(std::size_t bytes);
  /// A pointer that frees by `free`, with the device current.
  std::shared_ptr<std::byte> owned(std::byte* memory, std::function<void(std::byte*)> free);
  /// The same for memory that `make` gets from elsewhere, with the device current. It throws when
  /// memory is short.
  void with_room(std::size_t bytes, const std::function<void()>& make);

 private:
  OwnedMemory allocate_once(std::size_t bytes);

  const std::shared_ptr<Api> api_;
  const int device_;
  const std::shared_ptr<EventPool> events_;
  const DeviceMemory framework_;
};

}  // namespace hvd::device
