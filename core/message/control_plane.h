#pragma once

#include <memory>

#include "control/control_plane.h"
#include "host/node.h"
#include "message/carrier.h"

namespace hvd::message {

/// Control messages over a carrier, between the ranks of `node`'s job; what needs no message goes
/// over the node's board. Threading: as control::ControlPlane says. A message is at most 256 MiB.
std::unique_ptr<control::ControlPlane> make_control_plane(std::shared_ptr<Carrier>,
                                                          std::shared_ptr<host::Node> node);

}  // namespace hvd::message
