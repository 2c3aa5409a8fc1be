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

/// In memory that processes share: a robust mutex, which a thread of one process holds for as long
/// as that is in the job. Whoever waits for it is woken when the process ends.
struct LifeLock {
  /// Once, before any process uses it.
  void initialize() noexcept;

  pthread_mutex_t mutex;
  std::atomic<std::uint32_t> held;   ///< 1: its process has taken it, now or before
  std::atomic<std::uint32_t> left;   ///< 1: its process has left the job, and its end means nothing
  std::atomic<std::uint32_t> ended;  ///< 1: its process runs no more
};

/// Every thread of the process is on its way out: none executes anything of the program's again.
/// False where that cannot be seen.
bool runs_no_more(const ProcessIdentity&) noexcept;

/// A thread that holds this process's lock and sees when another process ends.
///
/// Note [The end of a process]: a pidfd tells of the end of a process when the kernel has freed its
/// memory, which takes 0.1 s and more for each GiB; the kernel gives robust mutexes free before.
/// It wakes one waiter, so each process waits for the next one in a circle, leaves out those that
/// are gone, and tells all others. A lock is no proof, as its thread may end by itself, and an
/// exec() leaves it too: so it is asked of /proc whether all threads have begun to exit. After that
/// the process writes to nothing that is shared. Processes of other pid namespaces are left out: of
/// their end their silence tells.
///
/// Thread-safe.
class LifeWatch {
 public:
  struct Member {
    LifeLock* lock = nullptr;
    ProcessIdentity process = {};
  };
  /// @param members of the host, in one order on all of them; one that took no lock is not seen
  /// @param tell_all called by the thread when `ended` of one has been set
  /// @param memory keeps what the others point to
  LifeWatch(std::vector<Member> members, std::size_t own, std::function<void()> tell_all,
            std::shared_ptr<void> memory);
  LifeWatch(const LifeWatch&) = delete;
  LifeWatch& operator=(const LifeWatch&) = delete;
  /// Does not wait: the thread gives the lock free within half a second.
  ~LifeWatch();

 private:
  class Thread;
  const std::shared_ptr<Thread> thread_;
};

}  // namespace hvd::host
