#pragma once

#include <memory>
#include <span>

#include "bootstrap/rendezvous.h"

namespace hvd::rendezvous {

/// Rank 0's part in the start of a job: Rendezvous::begin(). See Note [The protocol].
std::unique_ptr<Rendezvous> make_rank_zero(std::unique_ptr<Store>, const RankInfo&,
                                           std::span<const std::byte> payload, Deadline,
                                           Deadline::duration limit);

}  // namespace hvd::rendezvous
