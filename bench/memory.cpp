#include "bench/memory.h"

#include <malloc.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace hvd::bench {
namespace {

std::size_t bytes_in(const char* file, const std::string& key) {
  std::ifstream status(file);
  for (std::string word; status >> word;) {
    if (word != key) continue;
    std::size_t kibibytes = 0;
    status >> kibibytes;
    return kibibytes * 1024;
  }
  return 0;
}

std::size_t status_bytes(const std::string& key) { return bytes_in("/proc/self/status", key); }

/// Bytes of shared memory that this process's resident size includes although they are the share of
/// other processes.
std::size_t counted_elsewhere() {
  const std::size_t resident = status_bytes("RssShmem:");
  return resident - std::min(resident, bytes_in("/proc/self/smaps_rollup", "Pss_Shmem:"));
}

}  // namespace

PeakMemory::PeakMemory() {
  forget();
  before_ = status_bytes("VmRSS:") - counted_elsewhere();
}

void PeakMemory::forget() {
  // Freed memory counts again when it is used again.
  malloc_trim(0);
  // proc(5): writing 5 resets the peak to the resident size.
  std::ofstream reset("/proc/self/clear_refs");
  reset << "5" << std::flush;
  possible_ = reset.good();
}

std::optional<std::size_t> PeakMemory::bytes() const {
  if (!possible_) return std::nullopt;
  const std::size_t peak = status_bytes("VmHWM:") - counted_elsewhere();
  return peak - std::min(peak, before_);
}

}  // namespace hvd::bench
