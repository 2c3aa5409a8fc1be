#pragma once

#include <optional>
#include <span>

#include "hvd/collectives.h"
#include "negotiation/messages.h"
#include "negotiation/process_set_table.h"

namespace hvd::runtime {

/// Checks what one rank can check alone and makes the request that travels. The name and the
/// ordinal of an unnamed operation are left to the caller.
/// @throws UsageError that says what, expected, got and what to do.
/// @param gpu the one of this rank, as this process counts them
wire::Request make_request(const Submission&, const control::ProcessSetTable&, int rank,
                           std::optional<int> gpu = std::nullopt);

/// Checks the unnamed groups of one call. The ranks know such a group by its kind and its first
/// member's number, from which the other members' numbers follow: so its members are of one kind
/// and process set, and all of them are in the call, in order.
/// @throws UsageError
void check_unnamed_groups(std::span<const Submission>, int rank);

}  // namespace hvd::runtime
