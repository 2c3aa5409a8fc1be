#include "public/elastic_maintenance.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "base/expect.h"
#include "base/log.h"
#include "base/thread.h"
#include "bootstrap/join.h"

namespace hvd::elastic {
namespace {

/// Longer than the first steps of most programs, and shorter than the time between two losses.
constexpr auto kDelay = std::chrono::milliseconds(100);

/// Held by a thread while it works.
Mutex& working() {
  static Mutex* const instance = new Mutex;  // never destroyed
  return *instance;
}

/// The process whose threads do the work. A forked child has no such threads.
pid_t& owner() {
  static pid_t process = 0;
  return process;
}

/// UCX must not be used while the exit handlers of its libraries run. Locks the mutex permanently.
void wait_at_exit() HVD_NO_THREAD_SAFETY_ANALYSIS {
  if (::getpid() == owner()) working().lock();
}

}  // namespace

void Maintenance::start(KeptObjects left) {
  HVD_EXPECT(!thread_.joinable(), "no call of start() since the last stop()");
  static std::once_flag registered;
  std::call_once(registered, [] {
    owner() = ::getpid();
    std::atexit(wait_at_exit);
  });
  left_ = std::move(left);
  {
    const MutexLock lock(mutex_);
    stopped_ = false;
  }
  try {
    thread_ = start_thread("hvd-maintenance", [this] { work(); });
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "the next generation is not prepared: " << error.what();
  }
}

void Maintenance::stop() {
  {
    const MutexLock lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  left_.release();
}

bool Maintenance::stopped_within_delay() {
  const TimePoint end = SteadyClock().now() + kDelay;
  const MutexLock lock(mutex_);
  while (!stopped_ && SteadyClock().now() < end) changed_.wait_until(mutex_, end);
  return stopped_;
}

void Maintenance::work() {
  if (stopped_within_delay()) return;
  const MutexLock lock(working());
  left_.release();
  try {
    runtime::prepare_generation();
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "the next generation is not prepared: " << error.what();
  }
}

}  // namespace hvd::elastic
