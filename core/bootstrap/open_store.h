#pragma once

#include <memory>
#include <string>

#include "bootstrap/messages.h"
#include "bootstrap/store.h"

namespace hvd::rendezvous {

/// Opens the store in which the ranks of a job find each other.
/// @param init_method "tcp://HOST:PORT", which rank 0 serves; "file:///path", in a folder that all
/// ranks can write to; or "hvdrun://NAME", which hvdrun sets
/// @throws UsageError for any other method, and when the address cannot be served; PeerLostError
/// when rank 0's port is not reached by the deadline
std::unique_ptr<Store> open_store(const std::string& init_method, const RankInfo&, Deadline);

}  // namespace hvd::rendezvous
