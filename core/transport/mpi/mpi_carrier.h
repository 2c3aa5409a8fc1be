#pragma once

#include <memory>

#include "transport/carrier.h"
#include "transport/mpi/mpi_world.h"

namespace hvd::mpi {

/// Makes a carrier that uses the two communicators of `world`. It passes only the channel bits of a
/// tag to MPI, because MPI's envelopes hold the source and each job has its own communicators.
/// Messages are never taken back; see Note [Who frees the buffer]. Threading: see message::Carrier.
/// This header does not need mpi.h.
std::shared_ptr<message::Carrier> make_mpi_carrier(std::shared_ptr<MpiWorld>);

}  // namespace hvd::mpi
