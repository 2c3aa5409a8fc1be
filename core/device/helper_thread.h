#pragma once

#include <functional>
#include <memory>

#include "base/clock.h"

namespace hvd::device {

/// Runs a function, now or later, on whatever thread; never drops one.
using RunAside = std::function<void(std::function<void()>)>;

/// A thread for what may wait for the device, as cudaMalloc and cudaFree do: whoever drives the
/// engine would miss heartbeats meanwhile. Runs one function after the other, in the order of
/// run(). Thread-safe. Begins with the first of them.
class HelperThread {
 public:
  /// @param patience of the destructor
  explicit HelperThread(Duration patience);
  HelperThread(const HelperThread&) = delete;
  HelperThread& operator=(const HelperThread&) = delete;
  /// Waits until all has been run. A device that hangs may keep the thread forever: then it is left
  /// behind, after `patience`.
  ~HelperThread();

  /// @param function must not throw; owns what it works with, as it may outlive everything else
  void run(std::function<void()> function);

 private:
  struct Queue;
  const std::shared_ptr<Queue> queue_;
  const Duration patience_;
};

}  // namespace hvd::device
