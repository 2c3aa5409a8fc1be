#pragma once

#include <cstddef>

namespace hvd::libtorch {

/// Bytes of a cache line.
inline constexpr std::size_t kCacheLine = 64;

/// Begins to load lines that will be written. A plain prefetch would load a line that another core
/// has as well, and the first store would have to ask for it again. x86-64 processors without this
/// instruction ignore it. GCC removes calls of functions that do nothing but __builtin_prefetch().
inline void prefetch_to_write(const void* begin, std::size_t bytes) noexcept {
  for (std::size_t at = 0; at < bytes; at += kCacheLine) {
    const std::byte* const line = static_cast<const std::byte*>(begin) + at;
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*line));
#else
    __builtin_prefetch(line, /*write=*/1);
#endif
  }
}

}  // namespace hvd::libtorch
