#pragma once

namespace hvd {

/// @addtogroup start
/// @{

/// For frameworks that exchange something on a thread of their own, which the program does not see:
/// a checkpoint that is written while training goes on.
///
/// While it lives, waits of the calling thread do not count as evidence of a deadlock, because the
/// program may be computing meanwhile. It nests. Belongs to one thread.
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

  /// Returns when no object of this class exists.
  static void wait_for_all();
};

/// @}

}  // namespace hvd
