#pragma once

#include <functional>
#include <memory>
#include <span>

#include "device/api.h"
#include "device/event_pool.h"
#include "device/helper_thread.h"
#include "device/memory_source.h"

namespace hvd::device {

/// What a Context is given from outside.
struct Surroundings {
  DeviceMemory memory = {};  ///< of the framework; empty: the device's own alone
  RunAside run_aside = {};   ///< empty: at once, on the calling thread
};

/// The GPU of one rank: which one, and what is kept on it between operations. One per Runtime; a
/// process works with one device.
///
/// Thread-safe. Nothing happens on the device before the first use.
class Context {
 public:
  /// @param device ordinal as this process sees it
  Context(std::shared_ptr<Api>, int device, Surroundings = {});
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Api& api() noexcept { return *api_; }
  /// The same. For use in run_aside(), which may outlive this.
  const std::shared_ptr<Api>& shared_api() const noexcept { return api_; }
  int device() const noexcept { return device_; }
  const std::shared_ptr<EventPool>& events() noexcept { return events_; }

  /// Queues launches that copy all pieces to the buffer, or from it: one for up to
  /// PieceTable::kMostEntries of them, none for none. With the device current. @throws Error for a
  /// form that is not supported()
  void copy_pieces(std::span<const Piece>, const CopyForm&, std::byte* buffer, bool to_buffer,
                   double factor, Stream);
  /// What the stream does from now on waits for the event (null: nothing to wait for). With the
  /// device current.
  void wait(Stream stream, const EventPtr& event);
  /// Where memory comes from. For use in run_aside(), which may outlive this.
  const std::shared_ptr<MemorySource>& memory() noexcept { return memory_; }
  /// Runs what may wait for the device beside the calling thread. @param function must not throw;
  /// owns what it works with, as it may outlive everything else
  void run_aside(std::function<void()> function);

 private:
  const std::shared_ptr<Api> api_;
  const int device_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<MemorySource> memory_;
  const RunAside run_aside_;
};

/// A queue that is destroyed with its owner. Made and destroyed with the device made current by
/// itself.
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
