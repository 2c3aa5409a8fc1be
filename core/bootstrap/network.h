#pragma once

#include <string>

#include "base/clock.h"

namespace hvd::rendezvous {

/// Name of the network interface over which this host reaches rank 0's ("tcp://HOST:PORT") or,
/// under hvdrun, another host of the job, by its routes. Sends nothing. Empty for loopback, for
/// other places, and for a host that does not resolve by the deadline.
/// @param place in which the ranks find each other, for example "tcp://node7:29400"
std::string interface_to(const std::string& place, Deadline deadline);

}  // namespace hvd::rendezvous
