#pragma once

#include <atomic>
#include <cstdint>

namespace hvd {

/// What a rank tells the ranks of its host without a message, in memory that all of them share: see
/// control::ScheduleLock. Zero is a valid beginning.
struct alignas(64) LockWords {
  std::atomic<std::uint64_t> arrived;  ///< position * 2, + 1 if the rank leaves the lock there
  std::atomic<std::uint64_t> asked;    ///< the position at which it asks the others to leave
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
              "the words are shared between processes");

}  // namespace hvd
