#pragma once

#include <memory>
#include <vector>

#include "base/mutex.h"
#include "device/api.h"
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
  /// the pointer is destroyed. That is safe at any time, because a stream waits for the record()
  /// that preceded its wait.
  EventPtr record(Stream);
  /// Number of events created so far. Repeated steps create none.
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
