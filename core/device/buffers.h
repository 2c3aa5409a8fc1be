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
/// thread (Context::run_aside()). Only the thread that drives the engine uses the pool, which
/// outlives its leases.
class BufferPool {
 public:
  explicit BufferPool(Context&);
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool();

  /// Begins to allocate the buffers of a ring, of this size each. A failure has no effect:
  /// prepare() allocates the buffers when they are needed.
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
  struct Making;
  bool take_what_was_made();
  void make(std::vector<std::size_t> capacities, bool needed);
  void retire_for_one_more();
  void free_what_is_done() noexcept;

  Context& context_;
  std::shared_ptr<Making> making_;  // null: no allocation under way
  std::vector<Buffer> prepared_;
  std::vector<Buffer> free_;         // in the order of their release
  std::vector<Buffer> retired_;      // too small, possibly still in use on the device
  std::vector<std::size_t> wanted_;  // kept for its memory
  std::size_t allocations_ = 0;
};

}  // namespace hvd::device
