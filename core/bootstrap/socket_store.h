#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "bootstrap/messages.h"
#include "bootstrap/store.h"

namespace hvd::rendezvous {

// Both functions also throw UsageError when the server has another job's name or token, and the
// refusal when it refuses this process. Later calls of the store throw PeerLostError(0) (rank 0) or
// Error (hvdrun) once the connection is broken. A call may end up to 2 s after its deadline if the
// server does not reply, a wait up to 10 s.

/// Opens a store that rank 0 serves at a TCP port for as long as its object exists. The other ranks
/// retry until they reach it.
/// @param host a name, an address, or an address of IPv6 in brackets
/// @throws UsageError when rank 0 cannot serve the port; PeerLostError(0) when it is not reached in
/// time
std::unique_ptr<Store> open_tcp_store(const std::string& host, std::uint16_t port, const RankInfo&,
                                      Deadline);

/// Opens the store that hvdrun serves through its agent on this host.
/// @param socket the agent's, in the abstract namespace
/// @throws UsageError when no agent listens there
std::unique_ptr<Store> open_hvdrun_store(const std::string& socket, const RankInfo&, Deadline);

}  // namespace hvd::rendezvous
