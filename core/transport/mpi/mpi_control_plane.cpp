#include "transport/mpi/mpi_control_plane.h"

#include <utility>

#include "transport/message_control_plane.h"
#include "transport/mpi/mpi_carrier.h"

namespace hvd::mpi {

std::unique_ptr<control::ControlPlane> make_mpi_control_plane(std::shared_ptr<MpiWorld> world) {
  const auto node = world->node();
  return message::make_control_plane(make_mpi_carrier(std::move(world)), node);
}

std::unique_ptr<control::ControlPlane> make_mpi_control_plane(
    std::chrono::milliseconds start_timeout) {
  return make_mpi_control_plane(MpiWorld::join({.start_timeout = start_timeout}));
}

}  // namespace hvd::mpi
