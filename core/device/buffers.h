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

/// Of a buffer for batches of as many bytes, with what their tensors are padded by; 0 where nothing
/// is fused.
std::size_t fusion_buffer_bytes(std::int64_t fusion_threshold) noexcept;

/// Exclusive use of a buffer. Move-only. Dropped without release(), the buffer leaves the pool and
/// is kept until the process ends: the device may still work on it.
class BufferLease {
 public:
  BufferLease() = default;
  BufferLease(BufferLease&&) noexcept;
  BufferLease& operator=(BufferLease&&) noexcept;
  ~BufferLease();

  std::span<std::byte> bytes() const noexcept { return {memory_.get(), size_}; }
  bool valid() const noexcept { return pool_ != nullptr; }
  /// Back to the pool; whoever gets the buffer next waits, on the device, for `after` (null: nobody
  /// has to).
  void release(EventPtr after);

 private:
  friend class BufferPool;

  BufferPool* pool_ = nullptr;
  std::shared_ptr<std::byte> memory_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

/// Buffers on the device that are used again and again without waiting for the device on the host:
/// with two, one batch is packed while another is reduced. Grows to what is asked for; memory is
/// made and freed beside the calling thread (Context::run_aside()). Used by the thread that drives
/// the engine; outlives its leases.
class BufferPool {
 public:
  explicit BufferPool(Context&);
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool();

  /// Begins to make as many buffers of this size as take turns. Where there is no memory for them
  /// nothing has happened: prepare() makes what is needed, when it is. @pre nothing was asked for
  /// yet
  void reserve(std::size_t size);
  /// Whether there is a buffer for each of these sizes, which then are to be leased, before this
  /// is asked for others. False: they are being made; ask again. @throws Error when the device has
  /// no memory left
  bool prepare(std::span<const std::size_t> sizes);
  /// At least `size` bytes, 256-byte aligned, contents arbitrary. What `stream` does next is done
  /// once the last user of the buffer has finished. With the device current. @pre prepare() was
  /// true for it
  BufferLease lease(std::size_t size, Stream stream);
  /// Buffers that were made so far.
  std::size_t allocations() const noexcept { return allocations_; }

 private:
  friend class BufferLease;
  struct Buffer {
    std::shared_ptr<std::byte> memory = nullptr;
    std::size_t capacity = 0;
    EventPtr free_after = {};
    std::size_t prepared_for = 0;  // of prepared_: the size that was asked for
  };
  struct Making;
  bool take_what_was_made();
  void make(std::vector<std::size_t> capacities, bool needed);
  void retire_for_one_more();
  void free_what_is_done() noexcept;

  Context& context_;
  std::shared_ptr<Making> making_;  // null: nothing is being made
  std::vector<Buffer> prepared_;
  std::vector<Buffer> free_;         // the one given back first is first
  std::vector<Buffer> retired_;      // too small, and maybe still in use on the device
  std::vector<std::size_t> wanted_;  // kept for its memory
  std::size_t allocations_ = 0;
};

}  // namespace hvd::device
