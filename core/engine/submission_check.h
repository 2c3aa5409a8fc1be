#pragma once

#include <optional>
#include <span>
#include <string>

#include "hvd/collectives.h"
#include "hvd/point_to_point.h"
#include "negotiation/messages.h"
#include "negotiation/process_set_table.h"

namespace hvd::runtime {

/// Checks a submission as far as one rank can, and makes the request that is sent. The caller sets
/// the name and the number of an unnamed operation.
/// @throws UsageError with the problem, the expected and the actual value, and advice
/// @param gpu the index of this rank's GPU in this process
wire::Request make_request(const Submission&, const control::ProcessSetTable&, int rank,
                           std::optional<int> gpu = std::nullopt);

/// Checks the unnamed groups of one call. The ranks identify such a group by its kind and its first
/// member's number, from which the other members' numbers follow. Its members must therefore have
/// the same kind and process set, and must all be in the call, in order.
/// @throws UsageError
void check_unnamed_groups(std::span<const Submission>, int rank);

/// Checks one side of a message as far as one rank can.
/// @param title describes it in the error text
/// @param gpu the index of this rank's GPU in this process
/// @throws UsageError
void check_message(const Message&, const std::string& title, const control::ProcessSetTable&,
                   int rank, std::optional<int> gpu = std::nullopt);

}  // namespace hvd::runtime
