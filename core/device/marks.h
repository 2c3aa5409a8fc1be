#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/api.h"
#include "hvd/status.h"

namespace hvd::device {

/// Marks that are used again, since making one takes the driver longer than a step may cost.
/// Thread-safe; owned by shared pointers, as its events may outlive everything else.
class MarkPool : public std::enable_shared_from_this<MarkPool> {
 public:
  static std::shared_ptr<MarkPool> create(std::shared_ptr<Api>, int device);
  MarkPool(const MarkPool&) = delete;
  MarkPool& operator=(const MarkPool&) = delete;
  ~MarkPool();

  /// The point that the stream has come to. The mark is used again once the last copy of the
  /// pointer is gone, which is safe at any time: a stream that has been told to wait for it waits
  /// for what it was recorded for.
  EventPtr record(Stream);
  /// Made so far; a step that repeats makes none.
  std::size_t made() const;

 private:
  friend class RecordedEvent;
  MarkPool(std::shared_ptr<Api> api, int device) : api_(std::move(api)), device_(device) {}
  Mark take();
  void give_back(Mark) noexcept;

  const std::shared_ptr<Api> api_;
  const int device_;
  mutable std::mutex mutex_;
  std::vector<Mark> free_;  // guarded by mutex_
  std::size_t made_ = 0;    // guarded by mutex_
};

}  // namespace hvd::device
