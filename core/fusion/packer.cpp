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

}  // namespace hvd::fusion
