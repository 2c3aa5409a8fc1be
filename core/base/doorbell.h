#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace hvd {

/// Wakes a sleeping engine, from another thread or another process on the host.
///
/// Lives in private or shared memory (no pointers, zero-initialised is valid). Two kinds of sleeper share a bell without waking each
/// other: the coordinator thread (standby) and a thread inside wait() that drives the engine (driver). While a driver is active the
/// standby sleeper is not woken; the driver looks after the bell and, on leaving, calls hand_back().
///
/// Protocol of a sleeper: t = ticket(); look for work; none: sleep(t, ...). A ring between ticket() and sleep() makes sleep() return at once.
class Doorbell {
 public:
  enum class Sleeper : std::uint32_t { kStandby = 1, kDriver = 2 };

  /// Any thread, any process. A system call only when someone sleeps.
  void ring() noexcept;

  std::uint32_t ticket() const noexcept { return rings_.load(std::memory_order_seq_cst); }
  /// Returns when rung after `ticket` was taken, or after `timeout`, or spuriously.
  void sleep(std::uint32_t ticket, Sleeper who, Duration timeout) noexcept;

  /// A driver takes over: from now on rings do not wake the standby sleeper.
  void take_over() noexcept;
  /// The driver leaves: rings wake the standby sleeper again, and one that came after `handled` wakes it now.
  void hand_back(std::uint32_t handled) noexcept;

 private:
  std::atomic<std::uint32_t> rings_{0};
  std::atomic<std::uint32_t> asleep_{0};   ///< bits of Sleeper that a ring has to wake
  std::atomic<std::uint32_t> driving_{0};  ///< a driver is active
};

}  // namespace hvd
