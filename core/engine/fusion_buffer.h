#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/shared_arena.h"

namespace hvd::runtime {

class FusionBufferPool;

/// Exclusive use of a buffer, given back to its pool at the end. Move-only.
class FusionLease {
 public:
  FusionLease() = default;
  FusionLease(FusionLease&& other) noexcept;
  FusionLease& operator=(FusionLease&& other) noexcept;
  ~FusionLease();

  std::span<std::byte> bytes() const noexcept { return {memory_.get(), size_}; }
  /// The buffer leaves the pool for good and is never freed: a peer or the transport may still
  /// write to it.
  void abandon() noexcept;

 private:
  friend class FusionBufferPool;
  using Memory = std::shared_ptr<std::byte>;

  FusionBufferPool* pool_ = nullptr;
  Memory memory_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

/// Keeps the memory of fused batches between uses, since mapping fresh pages costs more than the
/// copy, in the arena if there is one. Grows to what is asked for; holds at most two free buffers.
/// Used by the thread that drives the engine; outlives its leases.
class FusionBufferPool {
 public:
  explicit FusionBufferPool(std::shared_ptr<SharedArena> arena = nullptr)
      : arena_(std::move(arena)) {}
  /// At least `size` bytes, 64-byte aligned, contents arbitrary. @throws std::bad_alloc
  FusionLease lease(std::size_t size);
  /// Frees what is free and larger than that.
  void trim(std::size_t largest) noexcept;
  std::size_t free_buffers() const noexcept { return free_.size(); }

 private:
  friend class FusionLease;
  struct Buffer {
    FusionLease::Memory memory;
    std::size_t capacity = 0;
  };
  void give_back(Buffer) noexcept;

  const std::shared_ptr<SharedArena> arena_;
  std::vector<Buffer> free_;
};

}  // namespace hvd::runtime
