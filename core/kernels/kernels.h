#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "hvd/types.h"

namespace hvd {

/// destination[i] = scale(op over sources, in the order given, of sources[r][i]), for `count`
/// elements. Thread-safe; no state.
///
/// Elements are combined strictly in source order and independently of one another, so the result
/// does not depend on how a tensor was cut up. `op` is sum, min, max, product or bitwise (an
/// average is a sum with scale.divisor). `destination` may be one of the sources; otherwise no
/// overlap. Any alignment.
///
/// Floating types: result = (op of prescale * x) * factor, factor = postscale / divisor computed in
/// double. fp32, fp16 and bf16 take both factors rounded to fp32 and compute in fp32 (fp16 and bf16
/// are rounded once, at the end); fp64 computes in fp64. A NaN in any source gives NaN, for min and
/// max too; of equal values (-0, +0) the first source's is kept. Integers: sums and products wrap;
/// with a divisor they are accumulated in 64 bits (int64: in 128) and the exact quotient is
/// truncated toward zero. Other factors: in long double, truncated toward zero and limited to the
/// type's range (NaN gives 0). Bool: sum and max are a logical or, product and min a logical and,
/// results are 0 or 1. Bitwise operations: integers and bool, without factors.
///
/// @throws Error when there is no source, `op` is average or adasum, the divisor is below 1, a bool
/// or a bitwise result is to be scaled, or `op` is bitwise and the type floating.
void reduce(std::span<const std::byte* const> sources, std::byte* destination, std::int64_t count,
            DataType, ReduceOp, const ReduceScale&);

/// As reduce(), and writes the result to every destination, in one pass over memory. Each may be
/// one of the sources (sources[r] == destinations[r] is an allreduce in place on every rank);
/// otherwise no overlap, neither with a source nor with another destination.
/// @throws Error as reduce(), and when there is no destination.
void reduce_to_all(std::span<const std::byte* const> sources,
                   std::span<std::byte* const> destinations, std::int64_t count, DataType, ReduceOp,
                   const ReduceScale&);

/// Bytes that an element takes between the stages of a reduction: see reduce_partly().
std::size_t partial_size(DataType, const ReduceScale&) noexcept;

/// A stage of a reduction whose sources are in several places. All stages have the same op and
/// scale. No overlap.
struct ReductionStage {
  const std::byte* before = nullptr;  ///< what the stage before has written; null at the first
  std::span<const std::byte* const> sources = {};
  std::byte* destination = nullptr;
  std::int64_t count = 0;  ///< elements
  DataType dtype = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  ReduceScale scale = {};
};
/// The first stage, or one in the middle: the destination gets elements of partial_size() bytes, in
/// which nothing has been rounded that reduce() would not have rounded.
/// @throws Error as reduce()
void reduce_partly(const ReductionStage&);
/// The last stage: the result is that of one reduce() of the sources of all stages, bit for bit.
/// @throws Error as reduce()
void reduce_last(const ReductionStage&);

/// The value that changes nothing under `op`, written `count` times (sum 0, product 1, min the
/// type's highest, all bits for bit_and, ...).
void fill_identity(std::byte* destination, std::int64_t count, DataType, ReduceOp);

}  // namespace hvd
