#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "hvd/types.h"

namespace hvd::runtime {

/// The progress of packing or unpacking. It is complete when `piece` is the number of pieces.
struct PackPosition {
  std::size_t piece = 0;
  std::size_t in_piece = 0;   ///< bytes
  std::size_t in_buffer = 0;  ///< bytes
};
/// No limit: one call copies all pieces.
inline constexpr std::size_t kAllBytes = SIZE_MAX;

/// Copies the pieces into the buffer without gaps, starting at a position, and stops after about
/// `most` bytes. Each piece counts as some additional bytes, so that many small pieces end a call
/// as well.
/// @return the position to continue from. @pre the sizes add up to buffer.size()
PackPosition pack(std::span<const std::span<const std::byte>> pieces, std::span<std::byte> buffer,
                  PackPosition from = {}, std::size_t most = kAllBytes);
/// The inverse of pack().
PackPosition unpack(std::span<const std::byte> buffer, std::span<const std::span<std::byte>> pieces,
                    PackPosition from = {}, std::size_t most = kAllBytes);

/// The 16-bit type of the elements in the buffer, and the factor by which they are multiplied.
struct PackCast {
  DataType buffer_type = DataType::kFloat16;
  double factor = 1.0;
};
/// Like pack(), for fp32 tensors and an fp16 or bf16 buffer: each element is multiplied by the
/// factor and rounded, see hvd::narrow().
/// @pre the buffer has room for as many elements as the pieces have
PackPosition pack_narrowed(std::span<const std::span<const std::byte>> pieces,
                           std::span<std::byte> buffer, const PackCast&, PackPosition from = {},
                           std::size_t most = kAllBytes);
/// The inverse of pack_narrowed(): each element is widened and then multiplied, see hvd::widen().
PackPosition unpack_widened(std::span<const std::byte> buffer,
                            std::span<const std::span<std::byte>> pieces, const PackCast&,
                            PackPosition from = {}, std::size_t most = kAllBytes);

}  // namespace hvd::runtime
