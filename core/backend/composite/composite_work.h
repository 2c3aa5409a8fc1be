#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "backend/backend.h"
#include "hvd/collectives.h"

/// Operations that consist of several collectives of one channel, one after the other.
namespace hvd::composite {

/// Starts a collective on the operation's channel. The spans must stay valid until the Work is
/// done.
using Launch = std::function<std::unique_ptr<Work>(const Collective&, std::span<const std::byte> in,
                                                   std::span<std::byte> out)>;

/// Returns the progress of an operation that has launched `launched` collectives, from the progress
/// of the last one.
constexpr std::optional<ProgressCount> progress_count_of(
    std::uint64_t launched, const std::optional<ProgressCount>& last) noexcept {
  if (!last) return std::nullopt;
  return ProgressCount{(launched << 32) + last->moves, last->waits_for};
}

/// An alltoall with splits. Exchanges the numbers of rows, allocates the output, then exchanges the
/// rows. This way no rank needs all splits, whose number is the square of the number of ranks.
/// `submission` must stay valid until the Work is done.
/// @pre its parameters are an Alltoall
/// @param launch_sizes launches the exchange of the numbers of rows, which are in the host's memory
/// @throws hvd::Error (from progress()) for an output of the wrong size
std::unique_ptr<Work> make_alltoall(Launch, const Launch& launch_sizes, Submission& submission);

/// Adaptive summation: pairs of vectors a, b become (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, in
/// a binary tree over the ranks in rank order. If a level has an odd number of vectors, the last
/// one passes to the next level, so the number of ranks is arbitrary. The result of orthogonal
/// vectors is their sum, and that of parallel vectors their average.
///
/// S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021,
/// arXiv:2006.02924.
///
/// Each rank holds one slice of every rank's vector, and the levels exchange only inner products. A
/// rank therefore sends twice the bytes of one vector in total, for any number of ranks. The
/// computation is in double precision, in rank order, and rounds once, so the result is the same on
/// every rank and in every run. `in` and `out` may be the same memory. Floating types only.
std::unique_ptr<Work> make_adasum(Launch, const Collective&, const ChannelSpec&,
                                  std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::composite
