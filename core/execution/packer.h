#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "hvd/types.h"

namespace hvd::runtime {

/// Copies the pieces one behind the other. @pre the sizes add up to buffer.size()
void pack(std::span<const std::span<const std::byte>> pieces, std::span<std::byte> buffer);
/// The reverse of pack().
void unpack(std::span<const std::byte> buffer, std::span<const std::span<std::byte>> pieces);

/// The same for tensors of fp32 and a buffer of fp16 or bf16: each element is multiplied by the
/// factor and rounded, see hvd::narrow().
/// @pre the buffer has room for as many elements as the pieces have
void pack_narrowed(std::span<const std::span<const std::byte>> pieces, std::span<std::byte> buffer,
                   DataType buffer_type, double factor);
/// The reverse, and multiplied afterwards, see hvd::widen().
void unpack_widened(std::span<const std::byte> buffer, std::span<const std::span<std::byte>> pieces,
                    DataType buffer_type, double factor);

}  // namespace hvd::runtime
