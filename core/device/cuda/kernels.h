#pragma once

#include <driver_types.h>

#include <cstddef>
#include <cstdint>

#include "device/api.h"

namespace hvd::device {

/// Queues one launch of the batched copy. An empty table needs no launch.
/// @param multiprocessors of the current device
/// @throws Error for a form that is not supported()
cudaError_t launch_copy(const CopyLaunch&, int multiprocessors, cudaStream_t);

/// Queues a fill with elements of 1, 2, 4 or 8 bytes.
cudaError_t launch_fill(std::byte* to, std::size_t count, std::size_t element_bytes,
                        std::uint64_t pattern, int multiprocessors, cudaStream_t);

}  // namespace hvd::device
