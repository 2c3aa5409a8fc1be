#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "message/carrier.h"
#include "ucx/worker.h"

namespace hvd::ucx {

/// What the ranks have told each other before messages are possible.
struct Membership {
  int rank = 0;
  std::uint32_t generation = 0;                        ///< see message/tag.h
  std::vector<std::vector<std::byte>> addresses = {};  ///< Worker::address() of each rank
};

/// The messages of a job over UCX's tags. Connections are made when a rank first sends to another,
/// one for each plane. Threading: as message::Carrier says.
///
/// Memory is always given back: Note [How a message is taken back]. The end of the carrier sends
/// off what is under way, for at most a second, if this rank has said farewell and nothing has
/// failed; else it closes all connections at once.
/// @throws hvd::Error when a tag has no room for the number of ranks, or for the generation
std::shared_ptr<message::Carrier> make_ucx_carrier(std::unique_ptr<Worker>, Membership);

}  // namespace hvd::ucx
