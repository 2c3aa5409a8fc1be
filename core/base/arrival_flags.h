#pragma once

#include <atomic>
#include <cstdint>

#include "base/cache_line.h"

namespace hvd {

/// A rank's arrival flags of schedule replay, in memory shared by the ranks of its host: see
/// control::ScheduleReplay. Zero is a valid initial state.
struct alignas(kCacheLine) ArrivalFlags {
  std::atomic<std::uint64_t> arrived;  ///< position * 2, + 1 if the rank leaves the replay there
  std::atomic<std::uint64_t> asked;    ///< the position at which it asks the others to leave
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
              "the words are shared between processes");

}  // namespace hvd
