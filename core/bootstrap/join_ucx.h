#pragma once

#include <memory>

#include "bootstrap/rendezvous.h"
#include "bootstrap/world.h"

namespace hvd::runtime {

/// A job whose messages travel over UCX, of the ranks that have met there. Collective.
/// @throws hvd::Error when a rank has no UCX that it can use, on all of them; PeerLostError when
/// one has said nothing by the deadline
std::shared_ptr<World> join_over_ucx(std::unique_ptr<rendezvous::Rendezvous>, Deadline);

}  // namespace hvd::runtime
