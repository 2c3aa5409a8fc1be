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

/// Where the processes of this host find an arena. Plain data, for shared memory.
struct ArenaAddress {
  std::int32_t process = 0;  ///< 0: there is no arena
  std::int32_t descriptor = -1;
  std::uint64_t capacity = 0;
  std::uint64_t identity =
      0;  ///< of the file behind the descriptor, since numbers of both are used again
};

/// Memory of this process that other processes of the host can map: what lies in it can be reduced
/// by peers where it lies.
///
/// Thread-safe. The file is sparse and has no name: pages exist once they are written to, and
/// nothing is left behind when the processes end. A child made by fork() keeps what it inherits, as
/// a copy, if its parent calls before_fork() and so on (docs/decisions/0016-shared-allocator.md).
class SharedArena {
 public:
  /// When a block's pages are taken from the system: once they are written to, or when it is
  /// allocated, so that there is an answer when there are none.
  enum class Pages { kWhenWritten, kWhenAllocated };

  /// As much as there is memory, within the limits of the process (`RLIMIT_FSIZE`, a part of
  /// `RLIMIT_AS`); pages are taken when allocated where the system never promises more memory than
  /// it has (vm.overcommit_memory=2). Null, with a reason in the log, where the system does not let
  /// us.
  static std::shared_ptr<SharedArena> create();
  static std::shared_ptr<SharedArena> create(std::size_t capacity,
                                             Pages pages = Pages::kWhenWritten);
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;
  ~SharedArena();

  /// 64-byte aligned, from 4 KiB on page-aligned; contents arbitrary. Null when the arena is full,
  /// or this process has inherited it.
  /// @throws std::bad_alloc, with nothing changed
  std::byte* allocate(std::size_t bytes);
  /// Allocates nothing. Does nothing in a process that has inherited the arena.
  /// @param returns_pages gives the memory back to the system. @pre `memory` comes from allocate()
  void deallocate(std::byte* memory, bool returns_pages) noexcept;
  /// Where in the arena all of this lies; nothing when it does not.
  std::optional<std::uint64_t> offset_of(const void* memory, std::size_t bytes) const noexcept;
  const ArenaAddress& address() const noexcept { return address_; }
  std::size_t used() const;

  /// To be called around fork(), by the thread that forks: nobody changes the arena meanwhile.
  void before_fork() HVD_ACQUIRE(mutex_) { mutex_.lock(); }
  void after_fork_in_parent() HVD_RELEASE(mutex_) { mutex_.unlock(); }
  /// From here on what this process writes to the memory is its own, and the arena gives nothing
  /// more.
  void after_fork_in_child() noexcept HVD_RELEASE(mutex_);
  bool inherited() const noexcept { return inherited_.load(std::memory_order_relaxed); }

 private:
  using Sizes = std::set<std::pair<std::size_t, std::size_t>>;  // size, offset
  using Blocks = std::map<std::size_t, std::size_t>;            // offset -> size
  /// A block that is in use keeps what it will need to be free again, so that freeing it cannot
  /// fail.
  struct Taken {
    Blocks::node_type block;
    Sizes::node_type size;
  };

  SharedArena(std::byte* base, const ArenaAddress&, Pages);
  bool take_pages(std::size_t begin, std::size_t size) const noexcept;

  std::byte* const base_;
  const ArenaAddress address_;
  const Pages pages_;
  std::atomic<bool> inherited_{false};
  mutable Mutex mutex_;
  Blocks free_ HVD_GUARDED_BY(mutex_);
  Sizes by_size_ HVD_GUARDED_BY(mutex_);                       // the same blocks
  std::map<std::size_t, Taken> taken_ HVD_GUARDED_BY(mutex_);  // by offset
  std::size_t used_ HVD_GUARDED_BY(mutex_) = 0;
};

/// 64-byte aligned memory of the arena, whose pages go back to the system at the end if
/// `returns_pages`; of the heap when there is no arena or it is full. The owner keeps the arena
/// alive. @throws std::bad_alloc
std::shared_ptr<std::byte> allocate_shared(const std::shared_ptr<SharedArena>&, std::size_t bytes,
                                           bool returns_pages);

/// Another process's arena, mapped here.
class PeerArena {
 public:
  /// Null when it cannot be reached (another user's, another namespace of processes, ...).
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
