#pragma once

#include <chrono>
#include <memory>

#include "control/control_plane.h"
#include "mpi/mpi_world.h"

namespace hvd::mpi {

/// Control messages over MPI, on a communicator of their own. Threading: as
/// hvd::control::ControlPlane says. A message is at most 256 MiB.
std::unique_ptr<control::ControlPlane> make_mpi_control_plane(std::shared_ptr<MpiWorld>);

/// The same in a world of its own, for a program that needs no MPI backend.
std::unique_ptr<control::ControlPlane> make_mpi_control_plane(
    std::chrono::milliseconds start_timeout);

}  // namespace hvd::mpi
