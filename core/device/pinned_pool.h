#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/shared_arena.h"
#include "device/api.h"
#include "hvd/status.h"

namespace hvd::device {

/// Host memory that the device copies to and from by itself, used again and again. Where the system
/// lets it be pinned it lies in the rank's arena, so that the other ranks of the host reduce it
/// where it is instead of copying it once more.
///
/// Used by the thread that drives the engine, with the device current. What is taken and not given
/// back is kept forever: the device or a peer may still be at work on it.
class PinnedPool {
 public:
  /// @param arena may be null: all memory comes from the device's library
  PinnedPool(Api&, int device, std::shared_ptr<SharedArena> arena);
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;
  ~PinnedPool();

  struct Buffer {
    std::byte* memory = nullptr;
    std::size_t capacity = 0;
    EventPtr free_after = {};  ///< null: free at once
  };
  /// @throws Error when there is no memory
  Buffer take(std::size_t bytes);
  void give_back(Buffer buffer) { free_.push_back(std::move(buffer)); }

 private:
  std::byte* allocate(std::size_t bytes);
  std::byte* allocate_in_arena(std::size_t bytes);
  void release(const Buffer&) noexcept;

  Api& api_;
  const int device_;
  const std::shared_ptr<SharedArena> arena_;
  bool pins_;  // until the system has refused it
  std::vector<Buffer> free_;
};

}  // namespace hvd::device
