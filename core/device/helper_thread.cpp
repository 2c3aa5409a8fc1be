#include "device/helper_thread.h"

#include <deque>
#include <utility>

#include "base/log.h"
#include "base/mutex.h"
#include "base/thread.h"

namespace hvd::device {

/// Shared with the thread, which may outlive the HelperThread.
struct HelperThread::Queue {
  Mutex mutex;
  Condition changed;
  std::deque<std::function<void()>> waiting HVD_GUARDED_BY(mutex);
  bool begun HVD_GUARDED_BY(mutex) = false;
  bool closed HVD_GUARDED_BY(mutex) = false;
  bool over HVD_GUARDED_BY(mutex) = false;

  /// Returns an empty value when no more functions will follow.
  std::function<void()> next() {
    const MutexLock lock(mutex);
    while (waiting.empty() && !closed) changed.wait(mutex);
    if (waiting.empty()) return nullptr;
    std::function<void()> function = std::move(waiting.front());
    waiting.pop_front();
    return function;
  }
  void end() {
    const MutexLock lock(mutex);
    over = true;
    changed.notify_all();
  }
};

HelperThread::HelperThread(Duration timeout)
    : queue_(std::make_shared<Queue>()), timeout_(timeout) {}

HelperThread::~HelperThread() {
  const TimePoint deadline = SteadyClock().now() + timeout_;
  const MutexLock lock(queue_->mutex);
  queue_->closed = true;
  queue_->changed.notify_all();
  while (queue_->begun && !queue_->over && SteadyClock().now() < deadline)
    queue_->changed.wait_until(queue_->mutex, deadline);
  if (queue_->begun && !queue_->over) {
    HVD_LOG(kError)
        << "a call that frees or allocates memory of a GPU has not returned; its thread is left "
           "behind, and the memory stays allocated until the process ends";
  }
}

void HelperThread::run(std::function<void()> function) {
  const MutexLock lock(queue_->mutex);
  queue_->waiting.push_back(std::move(function));
  queue_->changed.notify_all();
  if (std::exchange(queue_->begun, true)) return;
  start_thread("hvd-memory", [queue = queue_] {
    while (std::function<void()> next = queue->next()) next();
    queue->end();
  }).detach();
}

}  // namespace hvd::device
