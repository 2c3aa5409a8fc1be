#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "base/mutex.h"

namespace hvd {

/// The address of an arena for other processes of the host. Plain data, for shared memory.
struct ArenaAddress {
  std::int32_t process = 0;  ///< 0: there is no arena
  std::int32_t descriptor = -1;
  std::uint64_t capacity = 0;
  std::uint64_t identity = 0;  ///< of the file, since process ids and descriptors are reused
};

/// Memory of this process that other processes of the host can map, so that peers reduce the
/// tensors in it in place.
///
/// Thread-safe. The file is sparse and has no name: pages exist once they are written to, and no
/// file remains when the processes end. A child made by fork() has a copy of the contents if its
/// parent calls before_fork() and the functions below it (docs/decisions/0016-shared-allocator.md).
class SharedArena {
 public:
  /// When the pages of a block are taken from the system: at the first write, or at its allocation,
  /// which then fails if the system has no free pages.
  enum class Pages { kWhenWritten, kWhenAllocated };

  /// Makes an arena as large as the host's memory, within the limits of the process
  /// (`RLIMIT_FSIZE`, a part of `RLIMIT_AS`). Pages are taken at allocation if the system does not
  /// overcommit memory (vm.overcommit_memory=2). Returns null, and logs the reason, if the system
  /// does not allow it.
  static std::shared_ptr<SharedArena> create();
  static std::shared_ptr<SharedArena> create(std::size_t capacity,
                                             Pages pages = Pages::kWhenWritten);
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;
  ~SharedArena();

  /// Allocates a block with arbitrary contents, aligned to 64 bytes, or to a page from 4 KiB on.
  /// Returns null when the arena is full or this process has inherited it.
  /// @throws std::bad_alloc without any effect
  std::byte* allocate(std::size_t bytes);
  /// Frees a block, without allocating memory. No effect in a process that has inherited the arena.
  /// @param returns_pages gives the memory back to the system. @pre `memory` comes from allocate()
  void deallocate(std::byte* memory, bool returns_pages) noexcept;
  /// Gives the pages of all free blocks back to the system. No effect in a process that has
  /// inherited the arena.
  void return_pages() noexcept;
  /// The offset of this range in the arena; empty if it is not wholly inside.
  std::optional<std::uint64_t> offset_of(const void* memory, std::size_t bytes) const noexcept;
  const ArenaAddress& address() const noexcept { return address_; }
  std::size_t used() const;

  /// Called around fork() by the thread that forks. No thread changes the arena in between.
  void before_fork() HVD_ACQUIRE(mutex_) { mutex_.lock(); }
  void after_fork_in_parent() HVD_RELEASE(mutex_) { mutex_.unlock(); }
  /// From here on writes of this process are private to it, and the arena allocates no more blocks.
  void after_fork_in_child() noexcept HVD_RELEASE(mutex_);
  bool inherited() const noexcept { return inherited_.load(std::memory_order_relaxed); }

 private:
  using Sizes = std::set<std::pair<std::size_t, std::size_t>>;  // size, offset
  using Blocks = std::map<std::size_t, std::size_t>;            // offset -> size
  /// A block in use holds the node that the free list needs later, so that freeing cannot fail.
  struct BlockInUse {
    Blocks::node_type block;
    Sizes::node_type size;
  };

  SharedArena(std::byte* base, const ArenaAddress&, Pages);
  bool allocate_pages(std::size_t begin, std::size_t size) const noexcept;

  std::byte* const base_;
  const ArenaAddress address_;
  const Pages pages_;
  std::atomic<bool> inherited_{false};
  mutable Mutex mutex_;
  Blocks free_ HVD_GUARDED_BY(mutex_);
  Sizes by_size_ HVD_GUARDED_BY(mutex_);                             // the same blocks
  std::map<std::size_t, BlockInUse> in_use_ HVD_GUARDED_BY(mutex_);  // by offset
  std::size_t used_ HVD_GUARDED_BY(mutex_) = 0;
};

/// Allocates memory aligned to 64 bytes from the arena, or from the heap if there is no arena or it
/// is full. With `returns_pages` its pages are returned to the system when it is freed. The pointer
/// keeps the arena alive. @throws std::bad_alloc
std::shared_ptr<std::byte> allocate_shared(const std::shared_ptr<SharedArena>&, std::size_t bytes,
                                           bool returns_pages);

/// A mapping of another process's arena.
class PeerArena {
 public:
  /// Returns null if the arena is not accessible (another user, another pid namespace, ...).
  static std::unique_ptr<PeerArena> map(const ArenaAddress&);
  PeerArena(const PeerArena&) = delete;
  PeerArena& operator=(const PeerArena&) = delete;
  ~PeerArena();

  std::byte* at(std::uint64_t offset) const noexcept { return base_ + offset; }

 private:
  PeerArena(std::byte* base, std::size_t capacity) : base_(base), capacity_(capacity) {}

  std::byte* const base_;
  const std::size_t capacity_;
};

}  // namespace hvd
