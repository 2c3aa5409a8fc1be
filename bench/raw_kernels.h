#pragma once

#include <mpi.h>

#include <memory>

#include "bench/exercise.h"
#include "bench/peers.h"

namespace hvd::bench {

/// hvd's reduction kernel (core/kernels/kernels.h) over memory that the ranks of a host share, with
/// a barrier of one counter per rank and nothing else: no names, no queue, no engine, no liveness.
/// What the runtime adds is the difference.
///
/// "raw-shared" when the exercise's tensors lie in shared memory: each rank reduces its slice of
/// all ranks' tensors where they are. "raw-staged" otherwise: in rounds of 128 KiB, what other
/// ranks need is copied into shared memory, every rank reduces its slice, and what others have
/// reduced is copied out. Collective. Null when it is no allreduce, there is one rank, or the ranks
/// do not share a host.
std::unique_ptr<Contender> make_raw_kernel(const Exercise& exercise, MPI_Comm communicator);

}  // namespace hvd::bench
