#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/context.h"
#include "hvd/status.h"

namespace hvd::device {

class BufferPool;

/// Size in bytes of a buffer for batches up to the fusion threshold, including the padding of their
/// tensors; 0 if fusion is off.
std::size_t fusion_buffer_bytes(std::int64_t fusion_threshold) noexcept;

/// Exclusive use of a buffer. Move-only. If it is destroyed without release(), the buffer leaves
/// the pool and is kept until the process ends, because the device may still use it.
class BufferLease {
 public:
  BufferLease() = default;
  BufferLease(BufferLease&&) noexcept;
  BufferLease& operator=(BufferLease&&) noexcept;
  ~BufferLease();

  std::span<std::byte> bytes() const noexcept { return {memory_.get(), size_}; }
  bool valid() const noexcept { return pool_ != nullptr; }
  /// Returns the buffer to the pool. Its next user waits on the device for `after`, if it is not
  /// null.
  void release(EventPtr after);

 private:
  friend class BufferPool;

  BufferPool* pool_ = nullptr;
  std::shared_ptr<std::byte> memory_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

/// Reusable device buffers. Reuse never blocks the host: with two buffers, one batch is packed
/// while another is reduced. The pool grows as requested. Memory is allocated and freed on another
/// thread (Context::run_on_helper()). Only the thread that drives the engine uses the pool, which
/// outlives its leases.
class BufferPool {
 public:
  explicit BufferPool(Context&);
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool();

  /// Begins to allocate two buffers of this size. A failure has no effect: prepare() allocates the
  /// buffers when they are needed.
  /// @pre no buffer was requested yet
  void reserve(std::size_t size);
  /// Returns true once there is a buffer for each of these sizes; lease them before the next call
  /// with other sizes. Returns false while they are being allocated: call again.
  /// @throws Error when the device is out of memory
  bool prepare(std::span<const std::size_t> sizes);
  /// Leases at least `size` bytes, aligned to 256, with arbitrary contents. Later work of `stream`
  /// waits on the device for the buffer's previous user. The device must be current.
  /// @pre prepare() has returned true for this size
  BufferLease lease(std::size_t size, Stream stream);
  /// Number of buffers allocated so far.
  std::size_t allocations() const noexcept { return allocations_; }

 private:
  friend class BufferLease;
  struct Buffer {
    std::shared_ptr<std::byte> memory = nullptr;
    std::size_t capacity = 0;
    EventPtr free_after = {};
    std::size_t prepared_for = 0;  // requested size, for buffers in prepared_
  };
  bool collect_allocated();
  void begin_allocation(std::vector<std::size_t> capacities, bool needed);
  void retire_smallest();
  void free_retired() noexcept;

  Context& context_;
  std::shared_ptr<HelperAllocation<Buffer>> allocation_;  // null: no allocation under way
  bool needs_allocation_ = false;                         // a batch waits for it
  std::vector<Buffer> prepared_;
  std::vector<Buffer> free_;         // in the order of their release
  std::vector<Buffer> retired_;      // too small, possibly still in use on the device
  std::vector<std::size_t> wanted_;  // keeps its capacity
  std::size_t allocations_ = 0;
};

/// Round-robin use of buffers that another object owns. The order depends only on the number of
/// calls, not on which buffer is free first, so that ranks with equal counts use the same buffer.
/// Only the thread that drives the engine uses it, one buffer at a time. Never blocks the host.
class BufferRing {
 public:
  explicit BufferRing(Api& api) : api_(api) {}

  /// Whether these buffers can hold `size` bytes.
  static bool fits(std::span<const std::span<std::byte>> buffers, std::size_t size) noexcept {
    return !buffers.empty() && size > 0 && size <= buffers.front().size();
  }
  /// Acquires the next buffer. Returns an empty span, and keeps the position, if `size` does not
  /// fit. Later work of `stream` waits on the device for the buffer's previous user. The device
  /// must be current.
  /// @pre the buffer acquired before has been released; `buffers` have one size and are always the
  /// same
  std::span<std::byte> acquire(std::span<const std::span<std::byte>> buffers, std::size_t size,
                               Stream stream);
  /// Returns the buffer. Its next user waits on the device for `after`, if it is not null.
  void release(EventPtr after);
  /// Whether all buffers are released and the device has finished with them.
  bool idle() const;

 private:
  Api& api_;
  std::vector<EventPtr> free_after_;
  std::size_t next_ = 0;
  bool acquired_ = false;
};

}  // namespace hvd::device
