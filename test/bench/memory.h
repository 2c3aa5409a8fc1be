#pragma once

#include <cstddef>
#include <optional>

namespace hvd::bench {

/// The largest resident memory of this process since start(), above what was resident then. Shared segments count once they are
/// touched, in every process.
class PeakMemory {
 public:
  /// Gives freed memory back to the system first, so that it is counted again when it is used again.
  void start();
  /// Bytes; nothing where the kernel does not let a process reset its peak.
  std::optional<std::size_t> bytes() const;

 private:
  std::size_t before_ = 0;
  bool possible_ = false;
};

}  // namespace hvd::bench
