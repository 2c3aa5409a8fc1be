#include "support/count_allocations.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>

namespace {

std::atomic<std::uint64_t> allocated{0};
std::atomic<std::uint64_t> allocated_in_bytes{0};
thread_local std::size_t smallest_refused = std::numeric_limits<std::size_t>::max();

void* counted(std::size_t bytes, std::size_t alignment) {
  allocated.fetch_add(1);
  allocated_in_bytes.fetch_add(bytes);
  if (bytes >= smallest_refused) throw std::bad_alloc();
  void* memory =
      alignment > alignof(std::max_align_t)
          ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
          : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

std::uint64_t hvd::testing::allocations() noexcept { return allocated.load(); }
std::uint64_t hvd::testing::allocated_bytes() noexcept { return allocated_in_bytes.load(); }

hvd::testing::RefuseLargeAllocations::RefuseLargeAllocations(std::size_t bytes) noexcept {
  smallest_refused = bytes;
}
hvd::testing::RefuseLargeAllocations::~RefuseLargeAllocations() {
  smallest_refused = std::numeric_limits<std::size_t>::max();
}

// These replace the library's operators for all code in this process.
void* operator new(std::size_t bytes) { return counted(bytes, 0); }
void* operator new[](std::size_t bytes) { return counted(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
