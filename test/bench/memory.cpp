#include "bench/memory.h"

#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace hvd::bench {
namespace {

std::size_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != key) continue;
    std::size_t kibibytes = 0;
    status >> kibibytes;
    return kibibytes * 1024;
  }
  return 0;
}

}  // namespace

PeakMemory::PeakMemory() {
  forget();
  before_ = status_bytes("VmRSS:");
}

void PeakMemory::forget() {
  // Freed memory counts again when it is used again.
  malloc_trim(0);
  // proc(5): 5 sets the peak to what is resident now.
  std::ofstream reset("/proc/self/clear_refs");
  reset << "5" << std::flush;
  possible_ = reset.good();
}

std::optional<std::size_t> PeakMemory::bytes() const {
  if (!possible_) return std::nullopt;
  const std::size_t peak = status_bytes("VmHWM:");
  return peak - std::min(peak, before_);
}

}  // namespace hvd::bench
