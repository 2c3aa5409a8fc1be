#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/shared_arena.h"
#include "engine/packer.h"
#include "engine/staging.h"

namespace hvd::runtime {

class FusionBufferPool;

/// Exclusive use of a buffer until the lease ends. Move-only.
class FusionLease {
 public:
  FusionLease() = default;
  FusionLease(FusionLease&&) noexcept = default;
  FusionLease& operator=(FusionLease&& other) noexcept;
  ~FusionLease();

  std::span<std::byte> bytes() const noexcept { return {memory_.get(), memory_ ? size_ : 0}; }
  /// Removes the buffer from the pool and never frees it: a peer or the transport may still write
  /// to it.
  void abandon() noexcept;

 private:
  friend class FusionBufferPool;

  FusionBufferPool* pool_ = nullptr;
  std::shared_ptr<std::byte> memory_;  // null: no buffer
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

/// Keeps the memory of fused batches between uses, because mapping fresh pages costs more than the
/// copy. Takes memory from the arena if there is one. Grows on demand; holds at most two free
/// buffers. Used by the thread that drives the engine; outlives its leases.
class FusionBufferPool {
 public:
  explicit FusionBufferPool(std::shared_ptr<SharedArena> arena = nullptr)
      : arena_(std::move(arena)) {}
  /// @return at least `size` bytes, 64-byte aligned, with arbitrary contents. @throws
  /// std::bad_alloc
  FusionLease lease(std::size_t size);
  /// Frees the unused buffers that are larger than `largest`.
  void trim(std::size_t largest) noexcept;
  std::size_t free_buffers() const noexcept { return free_.size(); }

 private:
  friend class FusionLease;
  /// Memory and its size.
  using FusionBuffer = std::pair<std::shared_ptr<std::byte>, std::size_t>;
  void reclaim(FusionBuffer) noexcept;

  const std::shared_ptr<SharedArena> arena_;
  std::vector<FusionBuffer> free_;  // the largest first
};

/// Staging in the host's memory, on the thread that drives the engine. A call handles about
/// kBytesPerCall bytes and completes its work before it returns, so there are no events. A batch of
/// one tensor is copied only if it is cast or has to be scaled first.
class HostStaging final : public Staging {
 public:
  /// @param pool shared by the queues of a rank; outlives this
  explicit HostStaging(FusionBufferPool& pool) : pool_(pool) {}

  const Staged& stage(const Batch&) override;
  bool pack_part(const Batch&) override;
  bool unpack_part(const Batch&) override;
  EventPtr unstage(const Batch&, EventPtr reduced) override;
  void abandon() noexcept override;
  EventPtr after_both(const EventPtr&, const EventPtr&) override { return nullptr; }

 private:
  bool pack_tensors(const Batch&);
  bool fill_neutral(const Collective&);

  FusionBufferPool& pool_;
  Staged staged_;
  FusionLease input_;            // empty: the output's buffer or the caller's memory
  FusionLease output_;           // empty: the caller's memory
  std::span<std::byte> packed_;  // destination of packing; empty: no packing
  PackPosition position_;        // of packing, then of unpacking
  bool unpacks_ = false;         // unpacking has begun
  std::vector<std::span<const std::byte>> input_pieces_;  // keep their memory
  std::vector<std::span<std::byte>> output_pieces_;
};

}  // namespace hvd::runtime
