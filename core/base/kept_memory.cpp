#include "base/kept_memory.h"

#include <mutex>
#include <utility>
#include <vector>

namespace hvd {

void keep_until_exit(std::shared_ptr<const void> owner) {
  struct Kept {
    std::mutex mutex;
    std::vector<std::shared_ptr<const void>> owners;
  };
  static Kept* const kept = new Kept;  // never destroyed
  const std::lock_guard lock(kept->mutex);
  kept->owners.push_back(std::move(owner));
}

}  // namespace hvd
