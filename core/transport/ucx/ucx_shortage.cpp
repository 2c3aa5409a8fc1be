#include "transport/ucx/ucx_shortage.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/limits.h"
#include "base/mutex.h"

namespace hvd::ucx {
namespace {

/// Memory may be freed again, so a record older than this does not explain an error.
constexpr Duration kMemoryExplains = std::chrono::seconds(1);

struct Shortage {
  std::atomic<int> error{0};  ///< a value of errno
  Mutex mutex;
  TimePoint time HVD_GUARDED_BY(mutex) = {};
  std::string text HVD_GUARDED_BY(mutex);  ///< UCX's own
};

Shortage& recorded() {
  static Shortage* const instance = new Shortage;  // never destroyed: UCX has threads
  return *instance;
}

bool of_descriptors(int error) noexcept { return error == EMFILE || error == ENFILE; }

/// For some errors UCX replaces the system's text by advice that names the limit.
int shortage_logged_in(const char* text) noexcept {
  if (std::strstr(text, "ulimit -n") != nullptr) return EMFILE;
  if (std::strstr(text, "ulimit -l") != nullptr) return ENOMEM;
  return shortage_in(text);
}

}  // namespace

void record_failed_call(int error) noexcept {
  if (!is_shortage(error)) return;
  Shortage& shortage = recorded();
  const MutexLock lock(shortage.mutex);
  shortage.time = SteadyClock().now();
  shortage.error.store(error);
}

void record_logged_error(const char* text) {
  const int error = shortage_logged_in(text);
  if (error == 0) return;
  Shortage& shortage = recorded();
  const MutexLock lock(shortage.mutex);
  shortage.time = SteadyClock().now();
  shortage.text = text;
  shortage.error.store(error);
}

std::string take_recorded_resource_exhaustion(Failure failure) {
  Shortage& shortage = recorded();
  int error = shortage.error.load(std::memory_order_relaxed);
  if (error == 0 && failure != Failure::kOfMemory) return {};
  if (failure == Failure::kInBackground && !of_descriptors(error)) return {};
  const MutexLock lock(shortage.mutex);
  error = shortage.error.exchange(0);
  std::string text = std::exchange(shortage.text, {});
  if (!of_descriptors(error) && SteadyClock().now() - shortage.time > kMemoryExplains) {
    error = 0;
    text.clear();
  }
  if (error == 0 && failure == Failure::kOfMemory) error = ENOMEM;
  if (error == 0) return {};
  return describe_shortage(error) + (text.empty() ? "" : "; UCX: " + text);
}

}  // namespace hvd::ucx
