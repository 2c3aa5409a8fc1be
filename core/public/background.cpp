#include "hvd/background.h"

#include <optional>

#include "base/mutex.h"
#include "base/thread_signals.h"

namespace hvd {
namespace {

thread_local int background_depth = 0;
thread_local std::optional<BlockedSignals> blocked_signals;

struct Exchanges {
  Mutex mutex;
  Condition ended;
  int alive HVD_GUARDED_BY(mutex) = 0;
};

Exchanges& exchanges() {
  // Never destroyed: a thread that writes a checkpoint may outlive static objects.
  static Exchanges& all = *new Exchanges;
  return all;
}

}  // namespace

BackgroundThread::BackgroundThread() noexcept {
  if (background_depth++ == 0) blocked_signals.emplace();
}
BackgroundThread::~BackgroundThread() {
  if (--background_depth == 0) blocked_signals.reset();
}
bool BackgroundThread::here() noexcept { return background_depth > 0; }

BackgroundExchange::BackgroundExchange() {
  Exchanges& all = exchanges();
  const MutexLock lock(all.mutex);
  ++all.alive;
}

BackgroundExchange::~BackgroundExchange() {
  Exchanges& all = exchanges();
  {
    const MutexLock lock(all.mutex);
    --all.alive;
  }
  all.ended.notify_all();
}

void BackgroundExchange::wait_for_all() {
  Exchanges& all = exchanges();
  const MutexLock lock(all.mutex);
  while (all.alive > 0) all.ended.wait(all.mutex);
}

}  // namespace hvd
