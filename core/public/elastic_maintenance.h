#pragma once

#include <thread>

#include "base/mutex.h"
#include "base/process_exit.h"

namespace hvd::elastic {

/// Does the work between two generations, which takes a few milliseconds, while the program's
/// function runs, so that no generation waits for it. Releases the objects that failed generations
/// have left, and prepares the connections of the next generation. Both begin a moment after
/// start(), so that they do not delay the first steps. Not thread-safe.
class Maintenance {
 public:
  Maintenance() = default;
  Maintenance(const Maintenance&) = delete;
  Maintenance& operator=(const Maintenance&) = delete;
  ~Maintenance() { stop(); }

  /// @pre no call of start() since the last stop()
  void start(KeptObjects left);
  /// Returns when the work is done, or skips it if it has not begun; remaining objects are then
  /// released by this call.
  void stop();

 private:
  bool stopped_within_delay();
  void work();

  Mutex mutex_;
  Condition changed_;
  bool stopped_ HVD_GUARDED_BY(mutex_) = false;
  KeptObjects left_;  ///< used by the thread while it runs
  std::jthread thread_;
};

}  // namespace hvd::elastic
