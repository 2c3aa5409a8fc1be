#include "fusion/packer.h"

#include <cstring>

namespace hvd::fusion {
namespace {

// memcpy wants valid pointers even for nothing, and an empty tensor has none.
void copy(std::byte* to, const std::byte* from, std::size_t size) {
  if (size > 0) std::memcpy(to, from, size);
}

}  // namespace

void pack(std::span<const std::span<const std::byte>> pieces, std::span<std::byte> buffer) {
  std::byte* to = buffer.data();
  for (const auto piece : pieces) {
    copy(to, piece.data(), piece.size());
    to += piece.size();
  }
}

void unpack(std::span<const std::byte> buffer, std::span<const std::span<std::byte>> pieces) {
  const std::byte* from = buffer.data();
  for (const auto piece : pieces) {
    copy(piece.data(), from, piece.size());
    from += piece.size();
  }
}

void unpack_gathered(std::span<const std::byte> gathered, const std::vector<std::vector<std::size_t>>& part_bytes,
                     std::span<const std::span<std::byte>> outputs) {
  const std::size_t ranks = part_bytes.empty() ? 0 : part_bytes[0].size();
  std::vector<std::byte*> to;
  for (const auto output : outputs) to.push_back(output.data());
  const std::byte* from = gathered.data();
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t tensor = 0; tensor < outputs.size(); ++tensor) {
      const std::size_t size = part_bytes[tensor][rank];
      copy(to[tensor], from, size);
      to[tensor] += size;
      from += size;
    }
  }
}

}  // namespace hvd::fusion
