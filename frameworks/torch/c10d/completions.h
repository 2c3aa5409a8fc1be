#pragma once

#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

namespace hvd::libtorch {

class PendingWork;

/// Completes the futures of works, on its own threads. One thread waits for the operations, in the
/// order in which they were added. Before it runs the callbacks of a future, it hands the remaining
/// works to another thread, so that a callback may wait for the future of a later work.
///
/// The threads start with the first work, and end when the owner has called stop() and no work is
/// left. They keep the object alive. Thread-safe.
class Completions : public std::enable_shared_from_this<Completions> {
 public:
  void add(c10::intrusive_ptr<PendingWork> work);
  /// Does not wait for the threads, because their callbacks may need a lock of the caller, such as
  /// Python's.
  void stop();

 private:
  void run();
  /// Lets another thread take the works over. Called with mutex_ held.
  void wake_thread();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<PendingWork>> works_;
  int idle_ = 0;          // threads in changed_.wait()
  bool waiting_ = false;  // a thread waits for an operation
  bool stopped_ = false;
};

}  // namespace hvd::libtorch
