#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "hvd/types.h"

/// The expected result of a reduction, computed element by element in simple code, and inputs that
/// differ by rank. Thread-safe; no state.
namespace hvd::testing {

using Bytes = std::vector<std::byte>;

/// `count` elements that differ by rank, by position and by seed. Integers use their whole range
/// (sums wrap). Floats use several binades, so that the last bits of a sum depend on its order; for
/// kProduct they are near 1. Bools are 0 or 1.
Bytes make_input(std::int64_t count, DataType, ReduceOp, int rank, std::uint64_t seed);

/// The elements of `inputs` (at least one, of equal size) combined in order, as kernels.h and
/// backend.h define it.
Bytes reference_reduce(const std::vector<Bytes>& inputs, DataType, ReduceOp, const ReduceScale&);

/// The result of a compressed allreduce of fp32 that the host reduces. Allreduce::compression
/// defines it. The op may be an average over all inputs.
Bytes reference_compressed(const std::vector<Bytes>& inputs, Compression, ReduceOp, double prescale,
                           double postscale);

/// The index of the first element that differs, or -1. Both hold whole elements.
std::int64_t first_difference(const std::byte* actual, const Bytes& expected, DataType);

}  // namespace hvd::testing
