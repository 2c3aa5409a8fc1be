#pragma once

#include <cstddef>
#include <optional>

namespace hvd::bench {

/// The largest resident memory of this process above what was resident at first. Memory that n
/// processes share counts for each with an n-th, as it is shared when bytes() is called.
class PeakMemory {
 public:
  PeakMemory();
  /// Bytes since the construction or the last forget(); no value where the kernel does not let a
  /// process reset its peak.
  std::optional<std::size_t> bytes() const;
  /// Forgets the peak, not what was resident at first.
  void forget();

 private:
  std::size_t before_ = 0;
  bool possible_ = false;
};

}  // namespace hvd::bench
