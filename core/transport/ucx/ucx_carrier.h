#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/carrier.h"
#include "transport/ucx/worker.h"

namespace hvd::ucx {

/// The members of a job, which the ranks have exchanged before they can send messages.
struct JobMembers {
  int rank = 0;
  std::uint32_t generation = 0;                        ///< see transport/carrier.h
  std::string key = {};                                ///< proves the identity of ranks
  std::vector<std::vector<std::byte>> addresses = {};  ///< Workers::address() of each rank
};

/// Makes a carrier that sends tagged messages over UCX. A connection for each plane and direction
/// is made when a rank first sends to another. A message waits, without blocking the sender, until
/// the connection exists and the receiver makes progress on that plane. Threading: see
/// message::Carrier.
///
/// Messages are cancelled at once: Note [How a message is cancelled]. If the user has enabled
/// transports through which a peer or hardware may access memory, a cancelled message's memory is
/// kept. The destructor sends the messages under way, for at most half a second, if this rank has
/// sent a farewell and has not failed. Otherwise no connection is closed before the process ends.
/// @throws hvd::Error when a tag has no room for the number of ranks or for the generation, or when
/// an address is invalid
std::shared_ptr<message::Carrier> make_ucx_carrier(Workers, JobMembers);

}  // namespace hvd::ucx
