#pragma once

#include <memory>

#include "transport/control_plane.h"

namespace hvd::control {

/// The control plane of a job that has one rank, which has no rank to send messages to.
std::unique_ptr<ControlPlane> make_self_control_plane();

}  // namespace hvd::control
