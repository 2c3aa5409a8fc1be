#pragma once

#include <optional>
#include <string>
#include <vector>

#include "negotiation/messages.h"

namespace hvd::control {

/// What `other` asks that cannot go together with `reference`, as a sentence that names the
/// operation, both ranks and both values; nothing when they agree. Allgather's and alltoall's first
/// dimension may differ.
std::optional<std::string> find_mismatch(const wire::Request& reference, int reference_rank,
                                         const wire::Request& other, int other_rank);

/// How a plan's request, as expanded for one rank, differs from what this rank submitted under that
/// name, as a sentence that names the operation, the rank and both values; nothing when it can be
/// run. Allocates only when there is a difference.
std::optional<std::string> find_misplanned(const wire::Request& planned,
                                           const wire::Request& submitted, int rank);

/// What no rank may ask even when all agree (a root outside the set, an allgather of a scalar, a
/// broadcast from a rank that has joined), as a sentence.
/// @param members the world ranks of the request's process set, ascending.
/// @param absent those of them that have joined and take no part of their own, ascending.
std::optional<std::string> find_fault(const wire::Request&, const std::vector<int>& members,
                                      const std::vector<int>& absent);

/// Size of an allgather's result; the largest number when it is more than that. @pre the shape is
/// not empty
std::int64_t gathered_bytes(const wire::Request&,
                            const std::vector<std::int64_t>& first_dims) noexcept;

/// "allreduce 'fc1.weight'".
std::string describe(const wire::Request&);

}  // namespace hvd::control
