#pragma once

#include <memory>

#include "transport/control_plane.h"

namespace hvd::control {

/// The control plane of a job that has one rank: messages go into a queue of this process.
std::unique_ptr<ControlPlane> make_self_control_plane();

}  // namespace hvd::control
