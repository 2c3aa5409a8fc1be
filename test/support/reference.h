#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "hvd/types.h"

/// What a reduction should give, element by element in the plainest code, and inputs that tell
/// ranks apart. Thread-safe; no state.
namespace hvd::testing {

using Bytes = std::vector<std::byte>;

/// `count` elements that differ by rank, by position and by seed. Integers use their whole range
/// (sums wrap), floats several binades (so that the order of a sum shows in its last bit; with
/// kProduct, values near 1), bools are 0 or 1.
Bytes make_input(std::int64_t count, DataType, ReduceOp, int rank, std::uint64_t seed);

/// The elements of `inputs` (at least one, of equal size) combined in order, as kernels.h and
/// backend.h define it.
Bytes reference_reduce(const std::vector<Bytes>& inputs, DataType, ReduceOp, const ReduceScale&);

/// What an allreduce of fp32 with this compression gives where the host reduces, as
/// Allreduce::compression defines it. The op may be an average over all inputs.
Bytes reference_compressed(const std::vector<Bytes>& inputs, Compression, ReduceOp, double prescale,
                           double postscale);

/// The index of the first element that differs, or -1. Both hold whole elements.
std::int64_t first_difference(const std::byte* actual, const Bytes& expected, DataType);

}  // namespace hvd::testing
