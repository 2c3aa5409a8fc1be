#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hvd {

/// Bytes of a cache line. Variables that two ranks write at the same time never share a line.
inline constexpr std::size_t kCacheLine = 64;
/// Bytes that the processor may fetch at once (two lines). A variable that one rank writes is at
/// least this far from one that another rank reads.
inline constexpr std::size_t kCacheLinePair = 2 * kCacheLine;

/// A rank's arrival flags for schedule replay, in memory that the ranks of its host share. See
/// control::ScheduleReplay. Zero is a valid initial state.
struct alignas(kCacheLine) ArrivalFlags {
  std::atomic<std::uint64_t> arrived;  ///< position * 2, + 1 if the rank leaves the replay there
  std::atomic<std::uint64_t>
      leave_requested;                ///< the position at which it requests that the others leave
  std::atomic<std::uint64_t> polled;  ///< the position whose flags it polls; it needs no ring
};

/// How many flags each rank has. Flag 0 belongs to the set of all ranks; a process set uses the
/// flag with its number modulo this constant (see control::may_replay()).
inline constexpr int kArrivalFlags = 64;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
              "the words are shared between processes");

}  // namespace hvd
