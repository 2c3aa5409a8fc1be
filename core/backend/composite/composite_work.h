#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "backend/backend.h"
#include "hvd/collectives.h"

/// Operations that are made of several collectives of one channel, one after the other.
namespace hvd::composite {

/// Starts a collective on the operation's channel. The spans must stay valid until the Work is
/// done.
using Launch = std::function<std::unique_ptr<Work>(const Collective&, std::span<const std::byte> in,
                                                   std::span<std::byte> out)>;

/// Headway of an operation that has begun `begun` collectives, from the headway of the last one.
constexpr std::optional<Headway> headway_of(std::uint64_t begun,
                                            const std::optional<Headway>& last) noexcept {
  if (!last) return std::nullopt;
  return Headway{(begun << 32) + last->moves, last->waits_for};
}

/// Exchanges how many rows go from whom to whom, asks for the output, then exchanges the rows: no
/// rank has to know all splits, which are the square of the number of ranks. `submission` stays
/// valid until the Work is done.
/// @pre its parameters are an Alltoall
/// @param launch_sizes for the sizes, which lie in the host's memory
/// @throws (from progress()) hvd::Error for an output of the wrong size.
std::unique_ptr<Work> make_alltoall(Launch, const Launch& launch_sizes, Submission& submission);

/// Adaptive summation: pairs of vectors a, b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, in
/// a binary tree over the ranks in rank order; with an odd number the last one passes to the next
/// level, so that any number of ranks will do. Where the vectors are orthogonal it is their sum,
/// where they are parallel their average.
///
/// S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021,
/// arXiv:2006.02924.
///
/// Each rank holds one slice of every rank's vector, and only the inner products travel from level
/// to level: twice the data of one vector in all, whatever the number of ranks. Computed in double
/// and rounded once, in rank order, so the result is the same on every rank and in every run. `in`
/// and `out` may be the same memory. Floating types only.
std::unique_ptr<Work> make_adasum(Launch, const Collective&, const ChannelSpec&,
                                  std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::composite
