#pragma once

#include <cstdint>

namespace hvd::testing {

/// The number of calls of operator new by this process, in any library. A program that links this
/// file gets operators new and delete that count.
std::uint64_t allocations() noexcept;
/// The number of bytes that were requested from operator new.
std::uint64_t allocated_bytes() noexcept;

}  // namespace hvd::testing
