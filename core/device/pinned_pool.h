#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/shared_arena.h"
#include "device/context.h"
#include "hvd/status.h"

namespace hvd::device {

/// Host memory that the device copies to and from by itself, used again and again. Where the system
/// lets it be pinned it lies in the rank's arena, so that the other ranks of the host reduce it
/// where it is instead of copying it once more.
///
/// Used by the thread that drives the engine, with the device current. Pinning and unpinning may
/// wait for the device, so that is done beside it (Context::run_aside()). What is taken and not
/// given back is kept forever: the device or a peer may still be at work on it.
class PinnedPool {
 public:
  /// Of buffers that have been given back, and that the device still uses; no more are made beside
  /// them.
  static constexpr std::size_t kMostInUse = 3;

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
  /// Begins to make so many of this size. Where there is no memory for them nothing has happened:
  /// take() has made what is needed, when it is. @pre nothing was asked for yet
  void reserve(std::size_t count, std::size_t bytes);
  /// Nothing: it is being made, or the device still uses kMostInUse of them; ask again. @throws
  /// Error when there is no memory
  std::optional<Buffer> take(std::size_t bytes);
  void give_back(Buffer buffer) { free_.push_back(std::move(buffer)); }

 private:
  class Source;
  struct Making;
  std::optional<Buffer> find(std::size_t bytes);
  void collect();
  void make(std::size_t count, std::size_t bytes, bool needed);

  Context& context_;
  const std::shared_ptr<Source> source_;
  std::shared_ptr<Making> making_;  // null: nothing is being made
  std::vector<Buffer> free_;
};

}  // namespace hvd::device
