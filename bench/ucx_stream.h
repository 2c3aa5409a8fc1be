#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bench/streams.h"

namespace hvd::bench {

using Bytes = std::vector<std::byte>;
/// Sends the bytes to the peer and returns the peer's bytes.
using Swap = Bytes (*)(const Bytes&, void* context);

/// The function of ucx_stream.cpp, which is in a library of its own: it links UCX, which reads its
/// settings when it is loaded, and hvd sets some of them before.
using OpenUcxStream = Stream* (*)(Swap, void* context);
inline constexpr const char* kOpenUcxStream = "hvd_bench_open_ucx_stream";

}  // namespace hvd::bench
