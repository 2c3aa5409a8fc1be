#pragma once

#include <cstddef>
#include <cstdint>

#include "hvd/types.h"

/// Between fp32 and the 16-bit floating types, for tensors on their way into a buffer and back.
namespace hvd {

/// to[i] = factor * from[i], the product in fp32 and rounded once to the nearest 16-bit number
/// (ties to even; beyond the range: infinity; subnormals are kept, a NaN stays one). No overlap;
/// any alignment. Thread-safe; no state.
/// @param from `count` elements of fp32  @param type of `to`: fp16 or bf16  @param factor is
/// rounded to fp32
/// @throws Error for another type
void narrow(const std::byte* from, std::byte* to, std::int64_t count, DataType type, double factor);

/// to[i] = factor * from[i] in fp32; what narrow() has made of a number becomes fp32 again without
/// being rounded.
/// @param from `count` elements of `type`: fp16 or bf16  @param to elements of fp32
/// @throws Error for another type
void widen(const std::byte* from, std::byte* to, std::int64_t count, DataType type, double factor);

namespace kernels {

enum class InstructionSet;

/// The entries for tests. Every instruction set gives the same bits. @pre the processor supports()
/// it
void narrow_with(InstructionSet, const std::byte* from, std::byte* to, std::int64_t count,
                 DataType type, double factor);
void widen_with(InstructionSet, const std::byte* from, std::byte* to, std::int64_t count,
                DataType type, double factor);

}  // namespace kernels
}  // namespace hvd
