#pragma once

#include <cstddef>
#include <cstdint>

#include "hvd/types.h"

/// Casts between fp32 and the 16-bit floating types, for compressed tensors.
namespace hvd {

/// to[i] = factor * from[i]. The product is in fp32 and is rounded once to the nearest 16-bit
/// number (ties to even; infinity beyond the range; subnormals and NaN are kept). The ranges must
/// not overlap, and may have any alignment. Thread-safe; no state.
/// @param from `count` elements of fp32  @param type of `to`: fp16 or bf16  @param factor is
/// rounded to fp32
/// @throws Error for another type
void narrow(const std::byte* from, std::byte* to, std::int64_t count, DataType type, double factor);

/// to[i] = factor * from[i] in fp32. The conversion to fp32 is exact. The rest as for narrow().
/// @param from `count` elements of `type`: fp16 or bf16  @param to elements of fp32
/// @throws Error for another type
void widen(const std::byte* from, std::byte* to, std::int64_t count, DataType type, double factor);

namespace kernels {

enum class InstructionSet;

/// For tests. All instruction sets give the same bits.
/// @pre supports() is true for the instruction set (checked by cast())
void narrow_with(InstructionSet, const std::byte* from, std::byte* to, std::int64_t count,
                 DataType type, double factor);
void widen_with(InstructionSet, const std::byte* from, std::byte* to, std::int64_t count,
                DataType type, double factor);

}  // namespace kernels
}  // namespace hvd
