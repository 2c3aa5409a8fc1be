#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/carrier.h"
#include "transport/ucx/workers.h"

namespace hvd::ucx {

/// What the ranks have told each other before messages are possible.
struct Membership {
  int rank = 0;
  std::uint32_t generation = 0;                        ///< see message/tag.h
  std::vector<std::vector<std::byte>> addresses = {};  ///< Workers::address() of each rank
};

/// The messages of a job over UCX's tags. Connections are made when a rank first sends to another,
/// one for each plane and direction; what is sent waits for them without blocking anybody, and for
/// the receiver: it has to look for a message of that plane. Threading: as message::Carrier says.
///
/// Memory is given back at once: Note [How a message is taken back]; where a peer or hardware may
/// touch it, which the user has to ask UCX for, it is kept. The end of the carrier sends off what
/// is under way, for half a second at most, if this rank has said farewell and nothing has failed;
/// else no connection is closed before the process ends.
/// @throws hvd::Error when a tag has no room for the number of ranks, or for the generation, or an
/// address is none
std::shared_ptr<message::Carrier> make_ucx_carrier(Workers, Membership);

}  // namespace hvd::ucx
