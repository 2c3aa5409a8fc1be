#pragma once

#include <optional>

#include "control/process_set_table.h"
#include "hvd/collectives.h"
#include "wire/messages.h"

namespace hvd::runtime {

/// Checks what one rank can check alone and makes the request that travels. The name and the
/// ordinal of an unnamed operation are left to the caller.
/// @throws UsageError that says what, expected, got and what to do.
/// @param gpu the one of this rank, as this process counts them
wire::Request make_request(const Submission&, const control::ProcessSetTable&, int rank,
                           std::optional<int> gpu = std::nullopt);

}  // namespace hvd::runtime
