#pragma once

#include <functional>
#include <memory>
#include <span>

#include "device/api.h"
#include "device/event_pool.h"
#include "device/helper_thread.h"
#include "device/memory_source.h"

namespace hvd::device {

/// Dependencies of a Context.
struct Surroundings {
  DeviceMemory memory = {};  ///< the framework's allocator; empty: only the device's own
  RunAside run_aside = {};   ///< empty: functions run at once on the calling thread
};

/// The GPU of one rank and the resources that are kept on it between operations. One per Runtime; a
/// process uses one device.
///
/// Thread-safe. The constructor does not touch the device.
class Context {
 public:
  /// @param device ordinal as this process sees it
  Context(std::shared_ptr<Api>, int device, Surroundings = {});
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Api& api() noexcept { return *api_; }
  /// The same, for functions passed to run_aside(), which may outlive this object.
  const std::shared_ptr<Api>& shared_api() const noexcept { return api_; }
  int device() const noexcept { return device_; }
  const std::shared_ptr<EventPool>& events() noexcept { return events_; }

  /// Queues launches that copy all pieces to the buffer or from it: one launch per
  /// PieceTable::kMostEntries pieces. The device must be current.
  /// @throws Error for a form that is not supported()
  void copy_pieces(std::span<const Piece>, const CopyForm&, std::byte* buffer, bool to_buffer,
                   double factor, Stream);
  /// Makes later work of the stream wait for the event, if it is not null. The device must be
  /// current.
  void wait(Stream stream, const EventPtr& event);
  /// The source of device memory, also for functions passed to run_aside().
  const std::shared_ptr<MemorySource>& memory() noexcept { return memory_; }
  /// Runs a function that may block on the device on another thread.
  /// @param function must not throw; owns all its data, since it may outlive every other object
  void run_aside(std::function<void()> function);

 private:
  const std::shared_ptr<Api> api_;
  const int device_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<MemorySource> memory_;
  const RunAside run_aside_;
};

/// A stream that is destroyed with its owner. Makes the device current by itself.
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
