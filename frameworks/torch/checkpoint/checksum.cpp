#include "checkpoint/checksum.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

namespace hvd::libtorch {
namespace {

constexpr std::size_t kSlices = 8;
using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

/// tables[k][b]: what byte b contributes when k more bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0xEDB88320U : 0);
    tables[0][byte] = value;
  }
  for (std::size_t k = 1; k < kSlices; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t value = tables[k - 1][byte];
      tables[k][byte] = (value >> 8) ^ tables[0][value & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

std::uint32_t one_byte(std::uint32_t value, char byte) {
  return (value >> 8) ^ kTables[0][(value ^ static_cast<unsigned char>(byte)) & 0xFF];
}

}  // namespace

// Eight bytes at a time ("slicing by 8"): a checkpoint has gigabytes.
std::uint32_t crc32(std::string_view bytes, std::uint32_t before) noexcept {
  static_assert(std::endian::native == std::endian::little);
  std::uint32_t value = ~before;
  while (bytes.size() >= kSlices) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof(word));
    word ^= value;
    value = 0;
    for (std::size_t k = 0; k < kSlices; ++k)
      value ^= kTables[kSlices - 1 - k][(word >> (8 * k)) & 0xFF];
    bytes.remove_prefix(kSlices);
  }
  for (const char byte : bytes) value = one_byte(value, byte);
  return ~value;
}

}  // namespace hvd::libtorch
