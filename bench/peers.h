#pragma once

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/exercise.h"

namespace hvd::bench {

/// One way to do an exercise. The benchmark times run().
class Contender {
 public:
  virtual ~Contender() = default;
  Contender() = default;
  Contender(const Contender&) = delete;
  Contender& operator=(const Contender&) = delete;

  virtual std::string name() const = 0;
  virtual void run() = 0;
  /// Whether run() leaves the result in the exercise's output.
  virtual bool does_the_exercise() const { return true; }
  /// Waits until no thread that run() has woken uses a core any more.
  virtual void settle() {}
};

inline constexpr std::size_t kChunkBytes = 256 * 1024;

/// Sums in place, in calls of `chunk_bytes` bytes each; 0: in one call.
void allreduce_sum(std::span<float> data, MPI_Comm communicator, std::size_t chunk_bytes);

/// Names of the peers, in the order in which they are reported.
std::vector<std::string> peer_names();

/// Makes the contenders that hvd is compared with at this size. The raw kernel (raw_kernels.h)
/// takes part in an allreduce within one host. "mpi" is one call, as a program would write it.
/// "mpi-chunked" is several calls of kChunkBytes with buffers that are reused, if the exercise is
/// larger than kChunkBytes. "copy" is a memcpy of the exercise's bytes on every rank at once.
std::vector<std::unique_ptr<Contender>> make_peers(const Exercise& exercise, MPI_Comm communicator);

}  // namespace hvd::bench
