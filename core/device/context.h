#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "device/api.h"
#include "device/helper_thread.h"
#include "hvd/device.h"
#include "hvd/status.h"

namespace hvd::device {

/// Pool of reusable events, because creating one is too slow for a step. Thread-safe. Held by
/// shared pointers, because events may outlive every other object.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  static std::shared_ptr<EventPool> create(std::shared_ptr<Api>, int device);
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  ~EventPool();

  /// Records an event at the stream's current position. The event is reused once the last copy of
  /// the pointer is destroyed. Reuse is always safe, because a stream waits for the record() that
  /// preceded its wait.
  EventPtr record(Stream);
  /// Number of events created so far. Repeated steps create no events.
  std::size_t created() const;

 private:
  friend class RecordedEvent;
  EventPool(std::shared_ptr<Api> api, int device) : api_(std::move(api)), device_(device) {}
  EventHandle acquire();
  void release(EventHandle) noexcept;

  const std::shared_ptr<Api> api_;
  const int device_;
  mutable Mutex mutex_;
  std::vector<EventHandle> free_ HVD_GUARDED_BY(mutex_);
  std::size_t created_ HVD_GUARDED_BY(mutex_) = 0;
};

/// Device memory with shared ownership. Destroying the last copy frees it, which may block on the
/// device.
struct OwnedMemory {
  std::shared_ptr<std::byte> memory = nullptr;
  EventPtr usable_after = nullptr;  ///< null: at once
};

/// The source of a GPU's memory: the framework's allocator if there is one, else the device's
/// library. Its calls may block on the device, so use it in Context::run_on_helper(). Thread-safe.
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
  /// Calls `allocate` with the device current, and again after emptying the framework's cache if it
  /// throws because memory is short.
  void with_room(std::size_t bytes, const std::function<void()>& allocate);

 private:
  OwnedMemory allocate_once(std::size_t bytes);

  const std::shared_ptr<Api> api_;
  const int device_;
  const std::shared_ptr<EventPool> events_;
  const DeviceMemory framework_;
};

/// Dependencies of a Context.
struct ContextDeps {
  DeviceMemory memory = {};        ///< the framework's allocator; empty: only the device's own
  RunOnHelper run_on_helper = {};  ///< empty: functions run at once on the calling thread
};

/// Resources that are being allocated on the helper's thread; see Context::allocate_on_helper().
template <class Resource>
struct HelperAllocation {
  std::atomic<bool> done{false};
  std::vector<Resource> resources = {};  // valid once done, as is the error
  std::exception_ptr error = nullptr;
};

/// The GPU of one rank and the resources that are kept on it between operations. One per Runtime; a
/// process uses one device.
///
/// Thread-safe. The constructor does not touch the device.
class Context {
 public:
  /// @param device ordinal as this process sees it
  Context(std::shared_ptr<Api>, int device, ContextDeps = {});
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Api& api() noexcept { return *api_; }
  /// The same, for functions passed to run_on_helper(), which may outlive this object.
  const std::shared_ptr<Api>& shared_api() const noexcept { return api_; }
  int device() const noexcept { return device_; }
  const std::shared_ptr<EventPool>& events() noexcept { return events_; }

  /// Queues launches that copy all pieces to the buffer or from it: one launch per
  /// PieceTable::kMaxEntries pieces. The device must be current.
  /// @throws Error for a form that is not supported()
  void copy_pieces(std::span<const Piece>, const CopyForm&, std::byte* buffer, bool to_buffer,
                   double factor, Stream);
  /// Makes later work of the stream wait for the event, if it is not null. The device must be
  /// current.
  void wait(Stream stream, const EventPtr& event);
  /// The source of device memory, also for functions passed to run_on_helper().
  const std::shared_ptr<MemorySource>& memory() noexcept { return memory_; }
  /// Runs a function that may block on the device on another thread.
  /// @param function must not throw; owns all its data, since it may outlive every other object
  void run_on_helper(std::function<void()> function);
  /// Calls allocate(resources) on that thread. Resources that the caller does not collect are
  /// destroyed there.
  template <class Resource, class Allocate>
  std::shared_ptr<HelperAllocation<Resource>> allocate_on_helper(Allocate allocate) {
    auto allocation = std::make_shared<HelperAllocation<Resource>>();
    run_on_helper([allocation, allocate = std::move(allocate)]() noexcept {
      try {
        allocate(allocation->resources);
      } catch (...) {
        allocation->error = std::current_exception();
      }
      allocation->done.store(true, std::memory_order_release);
    });
    return allocation;
  }

 private:
  const std::shared_ptr<Api> api_;
  const int device_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<MemorySource> memory_;
  const RunOnHelper run_on_helper_;
};

/// A stream that is destroyed with its owner. The device need not be current.
class OwnedStream {
 public:
  explicit OwnedStream(Context&);
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  ~OwnedStream();
  Stream get() const noexcept { return stream_; }

 private:
  Context& context_;
  Stream stream_;
};

}  // namespace hvd::device
