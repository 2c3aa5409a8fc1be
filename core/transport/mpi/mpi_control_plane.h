#pragma once

#include <chrono>
#include <memory>

#include "transport/control_plane.h"
#include "transport/mpi/mpi_world.h"

namespace hvd::mpi {

/// Makes message::make_control_plane() over MPI, with the control communicator of `world`.
std::unique_ptr<control::ControlPlane> make_mpi_control_plane(std::shared_ptr<MpiWorld>);

/// The same in a new world, for a program that needs no MPI backend.
std::unique_ptr<control::ControlPlane> make_mpi_control_plane(
    std::chrono::milliseconds start_timeout);

}  // namespace hvd::mpi
