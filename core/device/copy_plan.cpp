#include "device/copy_plan.h"

#include <algorithm>
#include <string>

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

std::vector<Tile> cut_into_tiles(std::span<const Piece> pieces, const CopyForm& form) {
  if (!supported(form)) {
    throw Error(
        "device copy: expected floating types to scale, and fp32 with fp16 or bf16 to cast; got " +
        std::string(to_string(form.tensor)) + " to " + std::string(to_string(form.buffer)) +
        (form.scales ? ", scaled" : ""));
  }
  const std::size_t tensor_element = size_of(form.tensor);
  const std::size_t buffer_element = size_of(form.buffer);
  // Every tile but the last of a piece starts as aligned as the piece does.
  const std::uint64_t most = kTileBytes / std::max(tensor_element, buffer_element);
  std::vector<Tile> tiles;
  for (const Piece& piece : pieces) {
    for (std::uint64_t first = 0; first < piece.count; first += most) {
      tiles.push_back({piece.tensor + first * tensor_element, piece.offset + first * buffer_element,
                       static_cast<std::uint32_t>(std::min(most, piece.count - first)), 0});
    }
  }
  return tiles;
}

}  // namespace hvd::device
