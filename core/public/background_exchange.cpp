#include "base/mutex.h"
#include "hvd/background.h"

namespace hvd {
namespace {

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
