#pragma once

#include <cstdint>

namespace hvd::testing {

/// How often this process has called operator new, in whatever library: a program that links this
/// has its own, which count.
std::uint64_t allocations() noexcept;
/// How many bytes it was asked for.
std::uint64_t allocated_bytes() noexcept;

}  // namespace hvd::testing
