#pragma once

#include <optional>
#include <string>

#include "bootstrap/messages.h"
#include "elastic/peer_address.h"

namespace hvd::runtime {

/// A process that may become a member of a job: the text of hvd::reconfigure_handle().
struct ReconfigureHandle {
  elastic::PeerAddress address = {};     ///< of its server
  rendezvous::ProcessInfo process = {};  ///< detects its end on this host, and describes it
  std::string id = {};                   ///< random, of the server
};

/// In a sorted list, the texts of one host are next to each other.
std::string encode(const ReconfigureHandle&);
/// Empty if the text is not a handle.
std::optional<ReconfigureHandle> decode_reconfigure_handle(const std::string&);

}  // namespace hvd::runtime
