#pragma once

#include <cstdint>
#include <string_view>

namespace hvd::libtorch {

/// CRC-32 as in zlib, gzip and PNG. @param before the checksum of what lies before these bytes, 0
/// if nothing does
std::uint32_t crc32(std::string_view bytes, std::uint32_t before = 0) noexcept;

}  // namespace hvd::libtorch
