#pragma once

#include <optional>
#include <string>

#include "wire/messages.h"

namespace hvd::control {

/// What `other` asks that cannot go together with `reference`, as a sentence that names the operation, both ranks and both values; nothing
/// when they agree. Allgather's and alltoall's first dimension may differ.
std::optional<std::string> find_mismatch(const wire::Request& reference, int reference_rank, const wire::Request& other,
                                         int other_rank);

/// "allreduce 'fc1.weight'".
std::string describe(const wire::Request&);

}  // namespace hvd::control
