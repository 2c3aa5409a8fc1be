#pragma once

#include <memory>

#include "message/carrier.h"
#include "mpi/mpi_world.h"

namespace hvd::mpi {

/// The messages of a job, over the two communicators of its world. Of a tag it uses what names the
/// channel: MPI's envelopes have the source, and each job has communicators of its own. Nothing is
/// ever taken back; see Note [Who frees the buffer]. Threading: as message::Carrier says. This
/// header does not need mpi.h.
std::shared_ptr<message::Carrier> make_mpi_carrier(std::shared_ptr<MpiWorld>);

}  // namespace hvd::mpi
