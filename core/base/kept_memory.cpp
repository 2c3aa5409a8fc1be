#include "base/kept_memory.h"

#include <utility>
#include <vector>

#include "base/mutex.h"

namespace hvd {

void keep_until_exit(std::shared_ptr<const void> owner) {
  struct Kept {
    Mutex mutex;
    std::vector<std::shared_ptr<const void>> owners HVD_GUARDED_BY(mutex);
  };
  static Kept* const kept = new Kept;  // never destroyed
  const MutexLock lock(kept->mutex);
  kept->owners.push_back(std::move(owner));
}

}  // namespace hvd
