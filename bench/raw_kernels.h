#pragma once

#include <mpi.h>

#include <memory>

#include "bench/exercise.h"
#include "bench/peers.h"

namespace hvd::bench {

/// hvd's reduction kernel (core/kernels/kernels.h) over memory that the ranks of a host share, with
/// a barrier of one counter per rank, without names, queue, engine or liveness checks. The
/// difference to hvd's time is the overhead of the runtime.
///
/// "raw-shared" when the exercise's tensors lie in shared memory: each rank reduces its slice of
/// all ranks' tensors where they are. "raw-staged" otherwise: in rounds of 128 KiB, each rank
/// copies its input into shared memory for the others, reduces its slice, and copies the slices of
/// the others out. Collective. Null when the exercise is not an allreduce, there is one rank, or
/// the ranks do not share a host.
std::unique_ptr<Contender> make_raw_kernel(const Exercise& exercise, MPI_Comm communicator);

}  // namespace hvd::bench
