#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string_view>

#include "backend/backend.h"
#include "base/text.h"
#include "hvd/error.h"

// Helpers by which the backends check a collective's arguments. See the table at hvd::Collective.
namespace hvd {

inline std::int64_t total(std::span<const std::int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

/// Whether no rank has data to move. The result is the same on all ranks. It is false for every
/// alltoall, because a rank has only its own sizes.
inline bool is_empty(const Collective& collective) {
  switch (collective.kind) {
    case OpKind::kAllgather:
    case OpKind::kReducescatter:
      return total(collective.counts) == 0;
    default:
      return collective.kind != OpKind::kAlltoall && collective.count == 0;
  }
}

/// Checks the arguments of Channel::launch().
/// @param backend the backend's name, for error texts
/// @param rank position of this rank in the channel's set of `ranks` ranks
/// @throws Error for memory of the wrong size, wrong counts, a root outside the set, and a kind
/// that moves no data
inline void check_arguments(std::string_view backend, const Collective& collective, int rank,
                            int ranks, std::span<const std::byte> in, std::span<std::byte> out) {
  const auto where = [&] { return text(backend, ": ", to_string(collective.kind)); };
  const auto expect = [&](const char* memory, std::int64_t elements, std::size_t bytes) {
    const auto expected = static_cast<std::size_t>(elements) * size_of(collective.dtype);
    if (elements < 0 || expected != bytes)
      throw Error(text(where(), ": expected an ", memory, " of ", elements, " elements, got ",
                       bytes, " bytes of ", to_string(collective.dtype)));
  };
  const auto expect_both = [&](std::int64_t input, std::int64_t output) {
    expect("input", input, in.size());
    expect("output", output, out.size());
  };
  const auto checked = [&](std::span<const std::int64_t> counts) {
    const bool valid = counts.size() == static_cast<std::size_t>(ranks) &&
                       std::ranges::all_of(counts, [](std::int64_t count) { return count >= 0; });
    if (!valid)
      throw Error(text(where(), ": expected ", ranks, " counts, none negative, got ", counts.size(),
                       " counts"));
    return counts;
  };
  const auto own = static_cast<std::size_t>(rank);
  switch (collective.kind) {
    case OpKind::kAllreduce:
      return expect_both(collective.count, collective.count);
    case OpKind::kBroadcast:
      if (collective.root < 0 || collective.root >= ranks)
        throw Error(text(where(), ": root ", collective.root, " of ", ranks, " ranks"));
      if (collective.root == rank) expect("input", collective.count, in.size());
      return expect("output", collective.count, out.size());
    case OpKind::kAllgather:
      return expect_both(checked(collective.counts)[own], total(collective.counts));
    case OpKind::kReducescatter:
      return expect_both(total(checked(collective.counts)), collective.counts[own]);
    case OpKind::kAlltoall:
      return expect_both(total(checked(collective.send_counts)), total(checked(collective.counts)));
    default:
      throw Error(text(backend, ": this backend has no ", to_string(collective.kind)));
  }
}

}  // namespace hvd
