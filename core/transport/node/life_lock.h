#pragma once

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/process_watch.h"

namespace hvd::host {

/// A robust mutex in shared memory, held by a thread of one process for as long as the process is
/// in the job. A thread that waits for it is woken when the process ends.
struct LifeLock {
  /// Call once, before any process uses the lock.
  void initialize() noexcept;

  pthread_mutex_t mutex;
  std::atomic<std::uint32_t> held;   ///< 1: the process holds the mutex or has held it
  std::atomic<std::uint32_t> left;   ///< 1: the process has left the job, so its end is no loss
  std::atomic<std::uint32_t> ended;  ///< 1: the process has ended
};

/// True if every thread of the process is exiting, so that the program's code no longer runs. False
/// where that cannot be determined.
bool has_exited(const ProcessIdentity&) noexcept;

/// A thread that holds this process's lock and detects the end of another process.
///
/// Note [The end of a process]: a pidfd signals the end of a process only after the kernel has
/// freed its memory, which takes 0.1 s or more per GiB. The kernel releases robust mutexes earlier,
/// and wakes a single waiter. The processes therefore form a ring: each waits for the next one that
/// has not ended, and notifies all others. A free lock alone is no proof, because its thread may
/// have ended by itself, and exec() releases it too. The thread therefore reads from /proc whether
/// all threads of the process are exiting. After that the process writes to no shared memory.
/// Processes in other pid namespaces are not in the ring; their end is detected by their missing
/// heartbeats.
///
/// Thread-safe.
class LifeWatch {
 public:
  struct Member {
    LifeLock* lock = nullptr;
    ProcessIdentity process = {};
  };
  /// @param members the processes of the host, in the same order on each of them; the end of a
  /// process that never took its lock is not detected
  /// @param notify_all called by the thread after it has set `ended` of a member
  /// @param memory owns the memory that `members` points to
  LifeWatch(std::vector<Member> members, std::size_t own, std::function<void()> notify_all,
            std::shared_ptr<void> memory);
  LifeWatch(const LifeWatch&) = delete;
  LifeWatch& operator=(const LifeWatch&) = delete;
  /// Does not wait. The thread releases the lock within half a second.
  ~LifeWatch();

 private:
  class Thread;
  const std::shared_ptr<Thread> thread_;
};

}  // namespace hvd::host
