#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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

/// A part of a piece that one block of threads copies.
struct Tile {
  std::byte* tensor;
  std::uint64_t offset;  ///< in the buffer, in bytes
  std::uint32_t count;   ///< elements
};

/// Bytes of a tile, on the side where it has more. A block of 512 threads copies it with four
/// 16-byte accesses per thread.
inline constexpr std::size_t kTileBytes = 32 << 10;

/// What one launch copies: pieces, and how they are cut into tiles. Work is shared out by bytes, so
/// that one large tensor among many small ones is no bottleneck. It travels as the kernel's
/// parameter, of which every version of CUDA takes 4 KiB: nothing is uploaded, and nothing has to
/// be kept for the device.
struct PieceTable {
  struct Entry {
    std::byte* tensor;
    std::uint64_t offset;      ///< in the buffer, in bytes
    std::uint32_t count;       ///< elements
    std::uint32_t first_tile;  ///< in the order of the entries
  };
  static constexpr std::uint32_t kMostEntries = 168;

  std::uint32_t entries = 0;
  std::uint32_t tiles = 0;
  std::uint32_t tile_elements = 0;   ///< of all tiles but the last of an entry
  std::uint16_t tensor_element = 0;  ///< bytes
  std::uint16_t buffer_element = 0;
  Entry entry[kMostEntries];
};
static_assert(sizeof(PieceTable) <= (4 << 10) - 32, "there are other parameters beside it");

/// Cuts pieces into the tables of as many launches as they take, in order. Pieces without elements
/// get no entry, very large ones several.
class PieceCutter {
 public:
  /// @param pieces outlive this. @throws Error for a form that is not supported()
  PieceCutter(std::span<const Piece> pieces, const CopyForm&);
  /// Fills the next table; false when nothing is left.
  bool next(PieceTable&);

 private:
  std::span<const Piece> pieces_;
  std::uint64_t done_ = 0;  // elements of the first of them
  std::uint32_t tile_elements_;
  std::uint16_t tensor_element_;
  std::uint16_t buffer_element_;
};

}  // namespace hvd::device
