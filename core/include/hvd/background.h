#pragma once

namespace hvd {

/// @addtogroup start
/// @{

/// Marks the calling thread as a background thread of a framework that runs operations without the
/// program's knowledge, for example to write a checkpoint during training.
///
/// While the object exists, waits of its thread do not count as evidence of a deadlock, because the
/// program may be computing meanwhile. Asynchronous signals are blocked for the thread, so that the
/// program's own threads handle them. Objects may nest. Destroy each on the thread that made it.
class BackgroundThread {
 public:
  BackgroundThread() noexcept;
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;
  ~BackgroundThread();

  /// Whether the calling thread has an object of this class.
  static bool here() noexcept;
};

/// While an object exists in this process, join() waits before this rank joins. An exchange that
/// every rank begins before it joins therefore never involves a rank that has joined. The exchange
/// must not depend on anything that this rank's program does after its call of join(). Thread-safe.
class BackgroundExchange {
 public:
  BackgroundExchange();
  BackgroundExchange(const BackgroundExchange&) = delete;
  BackgroundExchange& operator=(const BackgroundExchange&) = delete;
  ~BackgroundExchange();

  /// Blocks until no object of this class exists.
  static void wait_for_all();
};

/// @}

}  // namespace hvd
