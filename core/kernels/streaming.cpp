#include "kernels/streaming.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/cache_line.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hvd::kernels {

#if defined(__x86_64__)

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  // A line of which only a part is streamed is read from memory and merged, which is slow.
  const std::size_t head = std::min(
      bytes, (kCacheLine - reinterpret_cast<std::uintptr_t>(to) % kCacheLine) % kCacheLine);
  const std::size_t body = (bytes - head) / kCacheLine * kCacheLine;
  if (head > 0) std::memcpy(to, from, head);
  for (std::size_t at = head; at < head + body; at += kCacheLine) {
    const auto* const source = reinterpret_cast<const __m128i*>(from + at);
    auto* const destination = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(destination, a);
    _mm_stream_si128(destination + 1, b);
    _mm_stream_si128(destination + 2, c);
    _mm_stream_si128(destination + 3, d);
  }
  const std::size_t tail = head + body;
  if (tail < bytes) std::memcpy(to + tail, from + tail, bytes - tail);
}

void streaming_fence() noexcept { _mm_sfence(); }

#else

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void streaming_fence() noexcept {}

#endif

}  // namespace hvd::kernels
