#pragma once

#include <string>

#include "base/clock.h"

namespace hvd::rendezvous {

/// Name of the network interface over which this host reaches the host of rank 0
/// ("tcp://HOST:PORT") or, under hvdrun, another host of the job, according to its routes. Sends no
/// message. Empty for loopback, for other URLs, and for a host that does not resolve by the
/// deadline.
/// @param url at which the ranks find each other, for example "tcp://node7:29400"
std::string interface_to(const std::string& url, Deadline deadline);

}  // namespace hvd::rendezvous
