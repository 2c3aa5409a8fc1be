#pragma once

#include <cstddef>

/// Stores that bypass the caches ("non-temporal"), for bytes that a distant core reads next. See
/// docs/decisions/0044-streaming-stores.md.
namespace hvd::kernels {

/// Copies bytes that do not overlap. On x86 all whole cache lines of the destination are streamed;
/// elsewhere this is memcpy(). Thread-safe. Other threads may see the stores in any order, so
/// streaming_fence() must come before the store that publishes them.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
/// Orders this thread's streamed stores before its later stores.
void streaming_fence() noexcept;

}  // namespace hvd::kernels
