#pragma once

#include <chrono>
#include <memory>

#include "base/clock.h"
#include "transport/carrier.h"
#include "transport/control_plane.h"
#include "transport/node/node.h"

namespace hvd::message {

/// A control plane over a carrier, between the ranks of `node`'s job. Signals within a host use the
/// node's shared memory instead of messages. Threading: see control::ControlPlane. A message has at
/// most 256 MiB.
/// @param time_to_connect for how long the start of a job waits for connections, which take some
/// ms. Later connections are established when they are first used. Zero if one thread drives all
/// ranks.
std::unique_ptr<control::ControlPlane> make_control_plane(
    std::shared_ptr<Carrier>, std::shared_ptr<host::Node> node,
    Duration time_to_connect = std::chrono::milliseconds(500));

}  // namespace hvd::message
