#include "execution/packer.h"

#include <cstring>

#include "base/cast.h"
#include "base/expect.h"

namespace hvd::runtime {
namespace {

// memcpy wants valid pointers even for nothing, and an empty tensor has none.
void copy(std::byte* to, const std::byte* from, std::size_t size) {
  if (size > 0) std::memcpy(to, from, size);
}

[[maybe_unused]] std::size_t bytes_of(auto pieces) {
  std::size_t bytes = 0;
  for (const auto piece : pieces) bytes += piece.size();
  return bytes;
}

}  // namespace

void pack(std::span<const std::span<const std::byte>> pieces, std::span<std::byte> buffer) {
  HVD_EXPECT(bytes_of(pieces) == buffer.size(), "the pieces fill the buffer");
  std::byte* to = buffer.data();
  for (const auto piece : pieces) {
    copy(to, piece.data(), piece.size());
    to += piece.size();
  }
}

void unpack(std::span<const std::byte> buffer, std::span<const std::span<std::byte>> pieces) {
  HVD_EXPECT(bytes_of(pieces) == buffer.size(), "the pieces fill the buffer");
  const std::byte* from = buffer.data();
  for (const auto piece : pieces) {
    copy(piece.data(), from, piece.size());
    from += piece.size();
  }
}

void pack_narrowed(std::span<const std::span<const std::byte>> pieces, std::span<std::byte> buffer,
                   DataType buffer_type, double factor) {
  HVD_EXPECT(bytes_of(pieces) / sizeof(float) * size_of(buffer_type) <= buffer.size(),
             "the buffer has room for all elements");
  std::byte* to = buffer.data();
  for (const auto piece : pieces) {
    const std::size_t count = piece.size() / sizeof(float);
    narrow(piece.data(), to, static_cast<std::int64_t>(count), buffer_type, factor);
    to += count * size_of(buffer_type);
  }
}

void unpack_widened(std::span<const std::byte> buffer, std::span<const std::span<std::byte>> pieces,
                    DataType buffer_type, double factor) {
  HVD_EXPECT(bytes_of(pieces) / sizeof(float) * size_of(buffer_type) <= buffer.size(),
             "the buffer has room for all elements");
  const std::byte* from = buffer.data();
  for (const auto piece : pieces) {
    const std::size_t count = piece.size() / sizeof(float);
    widen(from, piece.data(), static_cast<std::int64_t>(count), buffer_type, factor);
    from += count * size_of(buffer_type);
  }
}

}  // namespace hvd::runtime
