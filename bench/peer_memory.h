#pragma once

#include <mpi.h>

#include <cstddef>
#include <vector>

namespace hvd::bench {

/// The same stretch of memory of every rank of a host, mapped here. It is found as any process
/// could find it, through /proc, and so without hvd's runtime. Not thread-safe.
class PeerMemory {
 public:
  /// Collective. @param own in a file that is mapped shared, as hvd::allocate_shared() gives; of
  /// equal size on all ranks
  PeerMemory(MPI_Comm communicator, std::byte* own, std::size_t bytes);
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;
  ~PeerMemory();

  /// False when some rank's memory cannot be mapped by some other: the same on every rank.
  bool complete() const noexcept { return complete_; }
  /// This rank's own is the memory itself. @pre complete()
  const std::vector<std::byte*>& of_ranks() const noexcept { return of_ranks_; }

 private:
  struct Mapping {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };

  std::vector<std::byte*> of_ranks_;
  std::vector<Mapping> mappings_;
  bool complete_ = false;
};

}  // namespace hvd::bench
