#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/clock.h"

/// Attributes for Clang's thread safety analysis: which lock or other capability a field or a
/// function needs. A build with Clang runs the analysis over `core` and `launcher`.
/// The macros are empty for other compilers. See docs/threading.md.
#if defined(__clang__)
#define HVD_THREAD_ANNOTATION(attribute) __attribute__((attribute))
#else
#define HVD_THREAD_ANNOTATION(attribute)
#endif

/// On a class: a capability, which one thread at a time can hold. `name` appears in diagnostics.
#define HVD_CAPABILITY(name) HVD_THREAD_ANNOTATION(capability(name))
/// On a class: holds a capability from construction to destruction.
#define HVD_SCOPED_CAPABILITY HVD_THREAD_ANNOTATION(scoped_lockable)
/// On a field: access requires the capability.
#define HVD_GUARDED_BY(capability) HVD_THREAD_ANNOTATION(guarded_by(capability))
/// On a function: the caller must hold the capability.
#define HVD_REQUIRES(...) HVD_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define HVD_ACQUIRE(...) HVD_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define HVD_RELEASE(...) HVD_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
/// On a function: the result that means success, and the capability that it then acquires.
#define HVD_TRY_ACQUIRE(...) HVD_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
/// On a function: returns a reference to this capability.
#define HVD_RETURN_CAPABILITY(capability) HVD_THREAD_ANNOTATION(lock_returned(capability))
/// On a function that the analysis cannot follow; a comment there gives the reason.
#define HVD_NO_THREAD_SAFETY_ANALYSIS HVD_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace hvd {

/// std::mutex with annotations, which libstdc++'s lacks. `core` and `launcher` use no other mutex.
class HVD_CAPABILITY("mutex") Mutex {
 public:
  void lock() HVD_ACQUIRE() { mutex_.lock(); }
  void unlock() HVD_RELEASE() { mutex_.unlock(); }
  bool try_lock() HVD_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class Condition;
  std::mutex mutex_;
};

/// Holds a mutex in its scope.
class HVD_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) HVD_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  /// Adopts a mutex that the caller has locked.
  MutexLock(Mutex& mutex, std::adopt_lock_t) HVD_REQUIRES(mutex) : mutex_(mutex) {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  ~MutexLock() HVD_RELEASE() { mutex_.unlock(); }

 private:
  Mutex& mutex_;
};

/// std::condition_variable for a Mutex. Waits may end spuriously, so callers test their condition
/// in a loop, where the analysis sees the lock under which it is read:
///
///    while (!ready_) changed_.wait(mutex_);
class Condition {
 public:
  void wait(Mutex& mutex) HVD_REQUIRES(mutex) {
    const Adopted adopted(mutex);
    condition_.wait(adopted.lock);
  }
  /// Waits for at most this time, by CLOCK_MONOTONIC.
  void wait_for(Mutex& mutex, Duration timeout) HVD_REQUIRES(mutex) {
    wait_until(mutex, SteadyClock().now() + timeout);
  }
  /// @param deadline in the time of SteadyClock
  void wait_until(Mutex& mutex, TimePoint deadline) HVD_REQUIRES(mutex) {
    const Adopted adopted(mutex);
    condition_.wait_until(adopted.lock, std::chrono::steady_clock::time_point(deadline));
  }
  void notify_one() noexcept { condition_.notify_one(); }
  void notify_all() noexcept { condition_.notify_all(); }

 private:
  /// Wraps a locked mutex in the lock type that std::condition_variable needs. The mutex stays
  /// locked.
  struct Adopted {
    explicit Adopted(Mutex& mutex) : lock(mutex.mutex_, std::adopt_lock) {}
    ~Adopted() { lock.release(); }
    mutable std::unique_lock<std::mutex> lock;
  };
  std::condition_variable condition_;
};

}  // namespace hvd
