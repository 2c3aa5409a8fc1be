#pragma once

#include <functional>
#include <memory>

#include "base/clock.h"

namespace hvd::device {

/// Runs a function later on some thread. Runs every function that it receives.
using RunOnHelper = std::function<void(std::function<void()>)>;

/// A thread for calls that may block on the device, such as cudaMalloc and cudaFree. The thread
/// that drives the engine would miss heartbeats during such calls. Runs one function at a time, in
/// the order of run(). The thread starts with the first call. Thread-safe.
class HelperThread {
 public:
  /// @param timeout for how long the destructor waits
  explicit HelperThread(Duration timeout);
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;
  /// Waits until all functions have run. If the device hangs, detaches the thread after `timeout`.
  ~HelperThread();

  /// @param function must not throw; owns all its data, since it may outlive every other object
  void run(std::function<void()> function);

 private:
  struct Queue;
  const std::shared_ptr<Queue> queue_;
  const Duration timeout_;
};

}  // namespace hvd::device
