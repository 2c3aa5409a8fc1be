#pragma once

#include <atomic>
#include <memory>

#include "base/mutex.h"
#include "observe/timeline_writer.h"

namespace hvd::runtime {

/// Where the timeline goes, if anywhere. Costs one relaxed load while it is off. Thread-safe.
class TimelineSlot {
 public:
  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  /// The writer, or null.
  std::shared_ptr<observe::TimelineWriter> writer() const {
    const MutexLock lock(mutex_);
    return writer_;
  }
  /// Exchanges the writer; the old one is destroyed, and its file completed, when its last user is
  /// done.
  std::shared_ptr<observe::TimelineWriter> exchange(
      std::shared_ptr<observe::TimelineWriter> writer) {
    const MutexLock lock(mutex_);
    on_.store(writer != nullptr, std::memory_order_relaxed);
    writer_.swap(writer);
    return writer;
  }

 private:
  std::atomic<bool> on_{false};
  mutable Mutex mutex_;
  std::shared_ptr<observe::TimelineWriter> writer_ HVD_GUARDED_BY(mutex_);
};

}  // namespace hvd::runtime
