#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "hvd/types.h"

namespace hvd {

constexpr bool is_floating(DataType type) noexcept {
  return type == DataType::kFloat16 || type == DataType::kBFloat16 || type == DataType::kFloat32 ||
         type == DataType::kFloat64;
}

/// destination[i] = scale(op over sources, in the order given, of sources[r][i]), for `count`
/// elements. Thread-safe; no state.
///
/// Each element is combined in source order, independently of the others, so the result does not
/// depend on how a tensor is divided. `op` is sum, min, max, product or bitwise (an average is a
/// sum with scale.divisor). `destination` may be one of the sources, and must not overlap them
/// otherwise. Any alignment.
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

/// Like reduce(), but writes the result to every destination, in one pass over memory. A
/// destination may be one of the sources (sources[r] == destinations[r] is an allreduce in place on
/// every rank). Otherwise it must not overlap a source or another destination.
/// @throws Error as reduce(), and when there is no destination.
void reduce_to_all(std::span<const std::byte* const> sources,
                   std::span<std::byte* const> destinations, std::int64_t count, DataType, ReduceOp,
                   const ReduceScale&);

/// Bytes of an element between the stages of a reduction. See reduce_partly().
std::size_t partial_size(DataType, const ReduceScale&) noexcept;

/// A stage of a reduction whose sources are on several hosts. All stages have the same op and
/// scale. The destination must not overlap the sources.
struct ReductionStage {
  const std::byte* before = nullptr;  ///< output of the previous stage; null for the first
  std::span<const std::byte* const> sources = {};
  std::byte* destination = nullptr;
  std::int64_t count = 0;  ///< elements
  DataType dtype = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  ReduceScale scale = {};
};
/// Runs any stage but the last. The destination receives elements of partial_size() bytes, which
/// are not rounded except where reduce() rounds too.
/// @throws Error as reduce()
void reduce_partly(const ReductionStage&);
/// Runs the last stage. The result has the same bits as one reduce() of the sources of all stages.
/// @throws Error as reduce()
void reduce_last(const ReductionStage&);

/// Writes the identity element of `op` `count` times: 0 for a sum, 1 for a product, the type's
/// highest value for min, all bits for bit_and, and so on.
void fill_identity(std::byte* destination, std::int64_t count, DataType, ReduceOp);

}  // namespace hvd
