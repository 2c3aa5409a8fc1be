#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/shared_arena.h"
#include "device/context.h"
#include "hvd/status.h"

namespace hvd::device {

/// Reusable pinned host memory. Where the system can pin it, the memory is in the rank's arena, so
/// the other ranks of the host reduce it in place instead of copying it.
///
/// Only the thread that drives the engine uses it, with the device current. Pinning and unpinning
/// may block on the device, so they run in Context::run_on_helper(). Buffers that are not released
/// are kept until the process ends, because the device or a peer may still use them.
class PinnedPool {
 public:
  /// If the device still uses this many released buffers, acquire() makes no further buffers.
  static constexpr std::size_t kMaxInUse = 3;

  /// @param arena may be null: all memory comes from the device's library
  PinnedPool(Context&, std::shared_ptr<SharedArena> arena);
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;
  ~PinnedPool();

  struct Buffer {
    std::byte* memory = nullptr;
    std::size_t capacity = 0;
    EventPtr free_after = {};  ///< null: free at once
  };
  /// Begins to make `count` buffers of this size. A failure has no effect: acquire() makes
  /// buffers when they are needed.
  /// @pre no buffer was requested yet
  void reserve(std::size_t count, std::size_t bytes);
  /// Returns a buffer, or an empty value while one is being made or the device still uses
  /// kMaxInUse: call again.
  /// @throws Error when there is no memory
  std::optional<Buffer> acquire(std::size_t bytes);
  void release(Buffer buffer) { free_.push_back(std::move(buffer)); }

 private:
  class Source;
  std::optional<Buffer> find(std::size_t bytes);
  void collect();
  void begin_allocation(std::size_t count, std::size_t bytes, bool needed);

  Context& context_;
  const std::shared_ptr<Source> source_;
  std::shared_ptr<HelperAllocation<Buffer>> allocation_;  // null: no allocation under way
  bool needs_allocation_ = false;                         // acquire() has requested it
  std::vector<Buffer> free_;
};

}  // namespace hvd::device
