#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "device/api.h"
#include "hvd/status.h"

namespace hvd::device {

/// Pool of reusable events, since creating one takes the driver longer than a step may cost.
/// Thread-safe; owned by shared pointers, as its events may outlive everything else.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  static std::shared_ptr<EventPool> create(std::shared_ptr<Api>, int device);
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  ~EventPool();

  /// Records an event at the stream's current position. It is reused once the last copy of the
  /// pointer is gone, which is safe at any time: a stream that was told to wait for it waits for
  /// what it was recorded for.
  EventPtr record(Stream);
  /// Created so far; a step that repeats creates none.
  std::size_t made() const;

 private:
  friend class RecordedEvent;
  EventPool(std::shared_ptr<Api> api, int device) : api_(std::move(api)), device_(device) {}
  EventHandle take();
  void give_back(EventHandle) noexcept;

  const std::shared_ptr<Api> api_;
  const int device_;
  mutable Mutex mutex_;
  std::vector<EventHandle> free_ HVD_GUARDED_BY(mutex_);
  std::size_t made_ HVD_GUARDED_BY(mutex_) = 0;
};

}  // namespace hvd::device
