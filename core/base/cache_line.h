#pragma once

#include <cstddef>

namespace hvd {

/// Bytes of a cache line. Variables that two ranks write at the same time never share one.
inline constexpr std::size_t kCacheLine = 64;
/// Bytes that the processor may fetch at once (two lines). A variable that one rank writes is at
/// least this far from one that another rank reads.
inline constexpr std::size_t kCacheLinePair = 2 * kCacheLine;

}  // namespace hvd
