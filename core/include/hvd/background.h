#pragma once

namespace hvd {

/// For frameworks that exchange something on a thread of their own, which the program does not see:
/// a checkpoint that is written while training goes on.
///
/// While it lives, waits of the calling thread are no evidence of a deadlock. The program may be
/// computing meanwhile, so that this rank has not stopped. It nests. Belongs to one thread.
class BackgroundThread {
 public:
  BackgroundThread() noexcept;
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;
  ~BackgroundThread();

  /// Whether the calling thread has one.
  static bool here() noexcept;
};

/// While one lives in this process, join() waits before this rank joins. So an exchange that every
/// rank has begun before it joins never meets ranks that have joined. The exchange must end without
/// anything that this rank's program does after its call of join(). Thread-safe.
class BackgroundExchange {
 public:
  BackgroundExchange();
  BackgroundExchange(const BackgroundExchange&) = delete;
  BackgroundExchange& operator=(const BackgroundExchange&) = delete;
  ~BackgroundExchange();

  /// Returns when none lives.
  static void wait_for_all();
};

}  // namespace hvd
