#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hvd::fusion {

/// Copies the pieces one behind the other. @pre the sizes add up to buffer.size()
void pack(std::span<const std::span<const std::byte>> pieces, std::span<std::byte> buffer);
/// The reverse of pack().
void unpack(std::span<const std::byte> buffer, std::span<const std::span<std::byte>> pieces);

/// Undoes the layout of a fused allgather. `gathered` holds one block per rank, and a block holds the rank's part of every tensor.
/// @param part_bytes [tensor][rank]
/// @param outputs per tensor: its parts in rank order
void unpack_gathered(std::span<const std::byte> gathered, const std::vector<std::vector<std::size_t>>& part_bytes,
                     std::span<const std::span<std::byte>> outputs);

}  // namespace hvd::fusion
