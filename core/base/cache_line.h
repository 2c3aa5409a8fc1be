#pragma once

#include <cstddef>

namespace hvd {

/// Bytes of a cache line: what two ranks write at the same time never shares one.
inline constexpr std::size_t kCacheLine = 64;
/// Bytes that the processor may fetch at once: what one rank writes while another reads what lies
/// beside it is this far apart.
inline constexpr std::size_t kCacheLinePair = 2 * kCacheLine;

}  // namespace hvd
