#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "hvd/backend.h"
#include "hvd/types.h"

namespace hvd {

/// destination[i] = scale(op over sources, in the order given, of sources[r][i]), for `count` elements.
///
/// Elements are combined strictly in source order and independently of one another, so the result does not depend on how a tensor
/// was cut up. fp16 and bf16 are accumulated in fp32 and rounded once, narrow integers in 64 bits. `op` is sum, min, max or product
/// (an average is a sum with scale.divisor). `destination` may be one of the sources; otherwise no overlap. Any alignment.
void reduce(std::span<const std::byte* const> sources, std::byte* destination, std::int64_t count, DataType, ReduceOp,
            const ReduceScale&);

/// The value that changes nothing under `op`, written `count` times (sum 0, product 1, min the type's highest, ...).
void fill_identity(std::byte* destination, std::int64_t count, DataType, ReduceOp);

}  // namespace hvd
