#pragma once

#include <mpi.h>

#include <memory>

#include "bench/exercise.h"
#include "bench/peers.h"

namespace hvd::bench {

/// Runs hvd's reduction kernel (core/kernels/kernels.h) on memory that the ranks of a host share,
/// with a barrier of one counter per rank, and without names, queue, engine or liveness checks. The
/// difference between hvd's time and this one is the overhead of the runtime.
///
/// If the exercise's tensors are in shared memory, the contender is "raw-shared": each rank reduces
/// its slice of all ranks' tensors in place. Otherwise it is "raw-staged": in rounds of 128 KiB,
/// each rank copies its input into shared memory, reduces its slice, and copies the other ranks'
/// slices out. Collective. Null when the exercise is not an allreduce, there is one rank, or the
/// ranks do not share a host.
std::unique_ptr<Contender> make_raw_kernel(const Exercise& exercise, MPI_Comm communicator);

}  // namespace hvd::bench
