#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/api.h"
#include "hvd/status.h"

namespace hvd::device {

/// Where the pool's memory comes from. Both are called with the device current.
struct Allocator {
  std::function<std::byte*(std::size_t)> allocate = {};
  std::function<void(std::byte*)> release = {};
};

class BufferPool;

/// Exclusive use of a buffer. Move-only. Dropped without release(), the buffer leaves the pool and
/// is never freed: the device may still work on it.
class BufferLease {
 public:
  BufferLease() = default;
  BufferLease(BufferLease&&) noexcept;
  BufferLease& operator=(BufferLease&&) noexcept;
  ~BufferLease() = default;

  std::span<std::byte> bytes() const noexcept { return {memory_, size_}; }
  bool valid() const noexcept { return pool_ != nullptr; }
  /// Back to the pool; whoever gets the buffer next waits, on the device, for `after` (null: nobody
  /// has to).
  void release(EventPtr after);

 private:
  friend class BufferPool;
  BufferPool* pool_ = nullptr;
  std::byte* memory_ = nullptr;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

/// Buffers on the device that are used again and again without waiting for the device on the host:
/// with two, one batch is packed while another is reduced. Grows to what is asked for. Used by the
/// thread that drives the engine; outlives its leases.
class BufferPool {
 public:
  BufferPool(Api&, int device, Allocator);
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool();

  /// At least `size` bytes, 256-byte aligned, contents arbitrary. What `stream` does next is done
  /// once the last user of the buffer has finished. @throws Error when the device has no memory
  /// left
  BufferLease lease(std::size_t size, Stream stream);
  std::size_t allocations() const noexcept { return allocations_; }

 private:
  friend class BufferLease;
  struct Buffer {
    std::byte* memory = nullptr;
    std::size_t capacity = 0;
    EventPtr free_after = {};
  };
  void free_what_is_done() noexcept;

  Api& api_;
  const int device_;
  const Allocator allocator_;
  std::vector<Buffer> free_;     // the one given back first is first
  std::vector<Buffer> retired_;  // too small, and maybe still in use on the device
  std::size_t allocations_ = 0;
};

}  // namespace hvd::device
