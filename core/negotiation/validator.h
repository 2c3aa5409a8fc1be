#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/expect.h"
#include "negotiation/messages.h"

namespace hvd::control {

/// The difference between two ranks' requests, as a sentence that names the operation, both ranks
/// and both values; empty when they agree. The first dimensions of gathering operations and of an
/// alltoall may differ.
std::optional<std::string> find_mismatch(const wire::Request& reference, int reference_rank,
                                         const wire::Request& other, int other_rank);

/// Compares a plan's request, as expanded for one rank, with the request that this rank submitted
/// under that name. Returns the difference as a sentence that names the operation, the rank and
/// both values; empty when the operation can run. Allocates only when there is a difference.
std::optional<std::string> find_misplanned(const wire::Request& planned,
                                           const wire::Request& submitted, int rank);

/// The reason why a request is wrong even when all ranks agree on it (a root outside the set, an
/// allgather of a scalar, a broadcast from a rank that has joined), as a sentence.
/// @param members the world ranks of the request's process set, ascending.
/// @param absent the members that have joined and did not submit the operation, ascending.
std::optional<std::string> find_fault(const wire::Request&, const std::vector<int>& members,
                                      const std::vector<int>& absent);

// The sizes in a request come from a peer, so sums and products of byte counts saturate instead of
// overflowing.

inline constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

/// @pre a >= 0 and b >= 0, as below.
inline std::int64_t saturating_sum(std::int64_t a, std::int64_t b) noexcept {
  HVD_EXPECT(a >= 0 && b >= 0, "counts are not negative");
  return a > kMaxBytes - b ? kMaxBytes : a + b;
}

inline std::int64_t saturating_product(std::int64_t a, std::int64_t b) noexcept {
  HVD_EXPECT(a >= 0 && b >= 0, "counts are not negative");
  return a != 0 && b > kMaxBytes / a ? kMaxBytes : a * b;
}

/// Size of an allgather's result in bytes, at most kMaxBytes. @pre the shape is not empty
std::int64_t gathered_bytes(const wire::Request&,
                            const std::vector<std::int64_t>& first_dims) noexcept;

/// "allreduce 'fc1.weight'".
std::string describe(const wire::Request&);

}  // namespace hvd::control
