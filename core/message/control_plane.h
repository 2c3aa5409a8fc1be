#pragma once

#include <chrono>
#include <memory>

#include "base/clock.h"
#include "control/control_plane.h"
#include "host/node.h"
#include "message/carrier.h"

namespace hvd::message {

/// Control messages over a carrier, between the ranks of `node`'s job; what needs no message goes
/// over the node's board. Threading: as control::ControlPlane says. A message is at most 256 MiB.
/// @param time_to_connect how long the beginning of a job waits for connections, which take some
/// ms. What is not there by then comes when it comes. Zero where one thread drives all ranks
std::unique_ptr<control::ControlPlane> make_control_plane(
    std::shared_ptr<Carrier>, std::shared_ptr<host::Node> node,
    Duration time_to_connect = std::chrono::milliseconds(500));

}  // namespace hvd::message
