#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "hvd/types.h"

/// The plan of a launch that gathers many tensors into one buffer, or scatters the buffer to them.
namespace hvd::device {

/// The conversion of each element. The two types differ only for a cast between fp32 and a 16-bit
/// floating type.
struct CopyForm {
  DataType tensor = DataType::kFloat32;
  DataType buffer = DataType::kFloat32;
  /// Whether elements are multiplied: fp64 in fp64, all other types in fp32, rounded once. Without
  /// scaling and cast, bytes are copied. Integers are never converted to floating point.
  bool scales = false;

  bool casts() const noexcept { return tensor != buffer; }
  friend bool operator==(const CopyForm&, const CopyForm&) = default;
};

/// Whether there is a kernel for this form: any type without scaling, floating types with it, and
/// casts between fp32 and fp16 or bf16.
bool supported(const CopyForm&) noexcept;

/// A tensor and the position of its elements in the buffer. Both need only the alignment of an
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

/// Bytes of a tile, on the wider side. A block of 512 threads copies it with four 16-byte accesses
/// per thread.
inline constexpr std::size_t kTileBytes = 32 << 10;

/// The work of one launch: pieces and their division into tiles. Tiles have equal size, so that one
/// large tensor among many small ones does not become a bottleneck. The table is passed as a kernel
/// parameter, for which every version of CUDA allows 4 KiB, so there is no upload and no lifetime
/// to manage.
struct PieceTable {
  struct Entry {
    std::byte* tensor;
    std::uint64_t offset;      ///< in the buffer, in bytes
    std::uint32_t count;       ///< elements
    std::uint32_t first_tile;  ///< in the order of the entries
  };
  static constexpr std::uint32_t kMaxEntries = 168;

  std::uint32_t entries = 0;
  std::uint32_t tiles = 0;
  std::uint32_t tile_elements = 0;   ///< of every tile except the last of an entry
  std::uint16_t tensor_element = 0;  ///< bytes
  std::uint16_t buffer_element = 0;
  Entry entry[kMaxEntries];
};
static_assert(sizeof(PieceTable) <= (4 << 10) - 32, "leaves room for the other parameters");

/// Cuts pieces into the tables of one or more launches, in order. An empty piece gets no entry, and
/// a very large one gets several.
class PieceCutter {
 public:
  /// @param pieces must outlive this object
  /// @throws Error for a form that is not supported()
  PieceCutter(std::span<const Piece> pieces, const CopyForm&);
  /// Fills the next table. Returns false when all pieces are done.
  bool next(PieceTable&);

 private:
  std::span<const Piece> pieces_;
  std::uint64_t done_ = 0;  // elements of the first piece that are in a table
  std::uint32_t tile_elements_;
  std::uint16_t tensor_element_;
  std::uint16_t buffer_element_;
};

}  // namespace hvd::device
