#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hvd::fusion {

/// Copies the pieces one behind the other. @pre the sizes add up to buffer.size()
void pack(std::span<const std::span<const std::byte>> pieces, std::span<std::byte> buffer);
/// The reverse of pack().
void unpack(std::span<const std::byte> buffer, std::span<const std::span<std::byte>> pieces);

}  // namespace hvd::fusion
