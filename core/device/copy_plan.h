#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hvd/types.h"

/// How many tensors are gathered into one buffer, or spread from it, by one launch.
namespace hvd::device {

/// What becomes of an element on its way. The two types differ only for a cast between fp32 and a
/// 16-bit floating type.
struct CopyForm {
  DataType tensor = DataType::kFloat32;
  DataType buffer = DataType::kFloat32;
  /// Elements are multiplied: fp64 in fp64, everything else in fp32, rounded once. Otherwise,
  /// without a cast, bytes are copied, which is how integers travel: no integer ever becomes a
  /// floating number.
  bool scales = false;

  bool casts() const noexcept { return tensor != buffer; }
  friend bool operator==(const CopyForm&, const CopyForm&) = default;
};

/// There is a copy of this form: any type without scaling, floating types with it, casts between
/// fp32 and fp16 or bf16.
bool supported(const CopyForm&) noexcept;

/// A tensor, and where its elements lie in the buffer. Neither needs to be aligned to more than the
/// element.
struct Piece {
  std::byte* tensor = nullptr;
  std::uint64_t offset = 0;  ///< in the buffer, in bytes
  std::uint64_t count = 0;   ///< elements
  friend bool operator==(const Piece&, const Piece&) = default;
};

/// A part of a piece that one block of threads copies. Read by the device: plain data.
struct Tile {
  std::byte* tensor;
  std::uint64_t offset;  ///< in the buffer, in bytes
  std::uint32_t count;   ///< elements
  std::uint32_t unused;  ///< 0: tables can be compared as bytes
};
static_assert(sizeof(Tile) == 24);

/// Bytes of a tile, on the side where it has more. A block of 512 threads copies it with four
/// 16-byte accesses per thread.
inline constexpr std::size_t kTileBytes = 32 << 10;

/// The pieces cut into tiles, in order: work is shared out by bytes, so that one large tensor among
/// many small ones is no bottleneck. Pieces without elements get none. @throws Error for a form
/// that is not supported()
std::vector<Tile> cut_into_tiles(std::span<const Piece>, const CopyForm&);

}  // namespace hvd::device
