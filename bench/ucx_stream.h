#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bench/streams.h"

namespace hvd::bench {

using Bytes = std::vector<std::byte>;
/// Gives the peer what is given, and returns what it has given.
using Swap = Bytes (*)(const Bytes&, void* context);

/// What ucx_stream.cpp has, in a library of its own: it links UCX, which reads settings when it is
/// loaded, and hvd makes some before.
using OpenUcxStream = Stream* (*)(Swap, void* context);
inline constexpr const char* kOpenUcxStream = "hvd_bench_open_ucx_stream";

}  // namespace hvd::bench
