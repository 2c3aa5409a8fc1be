#pragma once

#include <cstddef>
#include <cstdint>

namespace hvd::testing {

/// The number of calls of operator new by this process, in any library. A program that links this
/// file gets operators new and delete that count.
std::uint64_t allocations() noexcept;
/// The number of bytes that were requested from operator new.
std::uint64_t allocated_bytes() noexcept;

/// While an object exists, operator new throws std::bad_alloc in the calling thread for requests of
/// at least `bytes` bytes.
class RefuseLargeAllocations {
 public:
  explicit RefuseLargeAllocations(std::size_t bytes) noexcept;
  RefuseLargeAllocations(const RefuseLargeAllocations&) = delete;
  RefuseLargeAllocations& operator=(const RefuseLargeAllocations&) = delete;
  ~RefuseLargeAllocations();
};

}  // namespace hvd::testing
