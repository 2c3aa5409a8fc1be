#pragma once

#include <memory>
#include <span>

#include "device/api.h"
#include "device/buffers.h"
#include "device/event_pool.h"

namespace hvd::device {

/// The GPU of one rank: which one, and what is kept on it between operations. One per Runtime; a
/// process works with one device.
///
/// Thread-safe. Nothing happens on the device before the first use.
class Context {
 public:
  /// @param device ordinal as this process sees it
  Context(std::shared_ptr<Api>, int device);
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Api& api() noexcept { return *api_; }
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
  /// cudaMalloc and its reverse.
  Allocator plain_memory();

 private:
  const std::shared_ptr<Api> api_;
  const int device_;
  const std::shared_ptr<EventPool> events_;
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
