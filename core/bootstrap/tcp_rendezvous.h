#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "bootstrap/rendezvous.h"

namespace hvd::rendezvous {

/// Meets at a port that rank 0 serves, in a thread, until its Rendezvous ends. The others try again
/// until it is there.
/// @throws UsageError also where this build has no Asio, and where rank 0 cannot have the port
std::unique_ptr<Rendezvous> meet_at_port(const std::string& host, std::uint16_t port,
                                         const Introduction&, Deadline);

}  // namespace hvd::rendezvous
