#include "engine/packer.h"

#include <algorithm>
#include <cstring>

#include "base/cache_line.h"
#include "base/expect.h"
#include "kernels/cast.h"

namespace hvd::runtime {
namespace {

/// Cost of finding the next piece, expressed in copied bytes.
constexpr std::size_t kBytesPerPiece = 128;

[[maybe_unused]] std::size_t bytes_of(auto pieces) {
  std::size_t bytes = 0;
  for (const auto piece : pieces) bytes += piece.size();
  return bytes;
}

[[maybe_unused]] bool begins(const PackPosition& at) noexcept {
  return at.piece == 0 && at.in_piece == 0;
}

/// Calls move(part of a piece, its offset in the buffer) for the next parts. Parts end between
/// elements.
/// @param piece_element bytes of an element in a piece
/// @param buffer_element bytes of an element in the buffer
template <class Byte, class Move>
PackPosition walk(std::span<const std::span<Byte>> pieces, PackPosition at, std::size_t most,
                  std::size_t piece_element, std::size_t buffer_element, const Move& move) {
  std::size_t spent = 0;
  while (at.piece < pieces.size() && spent < most) {
    const std::span<Byte> rest = pieces[at.piece].subspan(at.in_piece);
    const std::size_t room = std::max(kCacheLine, (most - spent) / kCacheLine * kCacheLine);
    const std::size_t bytes = std::min(rest.size(), room);
    // memcpy requires valid pointers even for zero bytes, and an empty tensor may have a null
    // pointer.
    if (bytes > 0) move(rest.first(bytes), at.in_buffer);
    at.in_buffer += bytes / piece_element * buffer_element;
    at.in_piece += bytes;
    if (bytes == rest.size()) at = {at.piece + 1, 0, at.in_buffer};
    spent += std::min(bytes + kBytesPerPiece, most - spent);
  }
  return at;
}

}  // namespace

PackPosition pack(std::span<const std::span<const std::byte>> pieces, std::span<std::byte> buffer,
                  PackPosition from, std::size_t most) {
  HVD_EXPECT(!begins(from) || bytes_of(pieces) == buffer.size(), "the pieces fill the buffer");
  return walk(pieces, from, most, 1, 1, [&](std::span<const std::byte> part, std::size_t at) {
    std::memcpy(buffer.data() + at, part.data(), part.size());
  });
}

PackPosition unpack(std::span<const std::byte> buffer, std::span<const std::span<std::byte>> pieces,
                    PackPosition from, std::size_t most) {
  HVD_EXPECT(!begins(from) || bytes_of(pieces) == buffer.size(), "the pieces fill the buffer");
  return walk(pieces, from, most, 1, 1, [&](std::span<std::byte> part, std::size_t at) {
    std::memcpy(part.data(), buffer.data() + at, part.size());
  });
}

PackPosition pack_narrowed(std::span<const std::span<const std::byte>> pieces,
                           std::span<std::byte> buffer, const PackCast& cast, PackPosition from,
                           std::size_t most) {
  const std::size_t element = size_of(cast.buffer_type);
  HVD_EXPECT(!begins(from) || bytes_of(pieces) / sizeof(float) * element <= buffer.size(),
             "the buffer has room for all elements");
  return walk(pieces, from, most, sizeof(float), element,
              [&](std::span<const std::byte> part, std::size_t at) {
                narrow(part.data(), buffer.data() + at,
                       static_cast<std::int64_t>(part.size() / sizeof(float)), cast.buffer_type,
                       cast.factor);
              });
}

PackPosition unpack_widened(std::span<const std::byte> buffer,
                            std::span<const std::span<std::byte>> pieces, const PackCast& cast,
                            PackPosition from, std::size_t most) {
  const std::size_t element = size_of(cast.buffer_type);
  HVD_EXPECT(!begins(from) || bytes_of(pieces) / sizeof(float) * element <= buffer.size(),
             "the buffer has room for all elements");
  return walk(pieces, from, most, sizeof(float), element,
              [&](std::span<std::byte> part, std::size_t at) {
                widen(buffer.data() + at, part.data(),
                      static_cast<std::int64_t>(part.size() / sizeof(float)), cast.buffer_type,
                      cast.factor);
              });
}

}  // namespace hvd::runtime
