#include "base/process_exit.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "base/thread.h"

namespace hvd {
namespace {

struct ExitLimit {
  Mutex mutex;
  std::chrono::milliseconds limit HVD_GUARDED_BY(mutex) = {};
  std::string why HVD_GUARDED_BY(mutex);
  std::once_flag registered;
};

ExitLimit& exit_limit() {
  static ExitLimit* const instance = new ExitLimit;  // never destroyed
  return *instance;
}

// Runs before the remaining exit handlers, because it is registered last.
void watch_exit(int code, void*) {
  ExitLimit& shared = exit_limit();
  std::chrono::milliseconds limit = {};
  std::string text;
  {
    const MutexLock lock(shared.mutex);
    limit = shared.limit;
    text = "hvd: " + shared.why + "\n";
  }
  std::fflush(nullptr);  // _exit() does not
  try {
    start_thread("hvd-exit", [limit, text, code] {
      std::this_thread::sleep_for(limit);
      static_cast<void>(!::write(STDERR_FILENO, text.data(), text.size()));
      ::_exit(code);
    }).detach();
  } catch (const std::exception& error) {
    HVD_LOG(kWarning) << "the end of the process cannot be watched: " << error.what();
  }
}

}  // namespace

void limit_exit(std::chrono::milliseconds limit, const std::string& why) noexcept {
  try {
    ExitLimit& shared = exit_limit();
    {
      const MutexLock lock(shared.mutex);
      shared.limit = limit;
      shared.why = why;
    }
    std::call_once(shared.registered, [] { ::on_exit(watch_exit, nullptr); });
  } catch (const std::exception& error) {
    HVD_LOG(kWarning) << "the end of the process cannot be watched: " << error.what();
  }
}

namespace {

struct AllKept {
  Mutex mutex;
  KeptObjects objects HVD_GUARDED_BY(mutex);
};

AllKept& all_kept() {
  static AllKept* const instance = new AllKept;  // never destroyed
  return *instance;
}

}  // namespace

void KeptObjects::release() noexcept {
  transports_.clear();
  memory_.clear();
}

void keep_until_exit(std::shared_ptr<const void> owner, Kept kind) {
  AllKept& kept = all_kept();
  const MutexLock lock(kept.mutex);
  auto& objects = kept.objects;
  (kind == Kept::kTransport ? objects.transports_ : objects.memory_).push_back(std::move(owner));
}

KeptObjects take_kept() noexcept {
  AllKept& kept = all_kept();
  const MutexLock lock(kept.mutex);
  return std::exchange(kept.objects, {});
}

}  // namespace hvd
