#include "device/copy_plan.h"

#include <algorithm>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::device {
namespace {

bool is_16_bit_float(DataType type) {
  return type == DataType::kFloat16 || type == DataType::kBFloat16;
}

}  // namespace

bool supported(const CopyForm& form) noexcept {
  if (form.casts()) {
    return (form.tensor == DataType::kFloat32 && is_16_bit_float(form.buffer)) ||
           (form.buffer == DataType::kFloat32 && is_16_bit_float(form.tensor));
  }
  return !form.scales || is_16_bit_float(form.tensor) || form.tensor == DataType::kFloat32 ||
         form.tensor == DataType::kFloat64;
}

PieceCutter::PieceCutter(std::span<const Piece> pieces, const CopyForm& form) : pieces_(pieces) {
  if (!supported(form)) {
    throw Error(text(
        "device copy: expected floating types to scale, and fp32 with fp16 or bf16 to cast; got ",
        to_string(form.tensor), " to ", to_string(form.buffer), form.scales ? ", scaled" : ""));
  }
  const std::size_t tensor_element = size_of(form.tensor);
  const std::size_t buffer_element = size_of(form.buffer);
  // Every tile of a piece has the alignment of the piece.
  tile_elements_ =
      static_cast<std::uint32_t>(kTileBytes / std::max(tensor_element, buffer_element));
  tensor_element_ = static_cast<std::uint16_t>(tensor_element);
  buffer_element_ = static_cast<std::uint16_t>(buffer_element);
}

bool PieceCutter::next(PieceTable& table) {
  // A multiple of the tile size, small enough that 32 bits can count the tiles of a table.
  const std::uint64_t most = std::uint64_t{tile_elements_} << 14;
  table.entries = 0;
  table.tiles = 0;
  table.tile_elements = tile_elements_;
  table.tensor_element = tensor_element_;
  table.buffer_element = buffer_element_;
  while (!pieces_.empty() && table.entries < PieceTable::kMaxEntries) {
    const Piece& piece = pieces_.front();
    const std::uint64_t count = std::min(most, piece.count - done_);
    if (count > 0) {
      table.entry[table.entries++] = {piece.tensor + done_ * tensor_element_,
                                      piece.offset + done_ * buffer_element_,
                                      static_cast<std::uint32_t>(count), table.tiles};
      table.tiles += static_cast<std::uint32_t>((count + tile_elements_ - 1) / tile_elements_);
      done_ += count;
    }
    if (done_ < piece.count) continue;
    pieces_ = pieces_.subspan(1);
    done_ = 0;
  }
  return table.entries > 0;
}

}  // namespace hvd::device
