#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace hvd {

/// Wakes a sleeping engine, from another thread or another process on the host.
///
/// Thread-safe, and process-safe in shared memory: it holds no pointers and zero-filled memory is a
/// valid doorbell. Two kinds of sleeper share a doorbell without waking each other: the engine
/// thread (standby) and a thread inside wait() that drives the engine (driver). While a driver is
/// active the standby sleeper is not woken: the driver handles rings and calls remove_driver() when
/// it leaves. Any number of threads may sleep as either kind. A ring wakes all sleepers of each
/// kind that it may wake.
///
/// Protocol of a sleeper: t = ticket(); look for work; sleep(t, ...) if no work was found. A ring
/// between ticket() and sleep() makes sleep() return at once. Protocol of a driver: take progress
/// ownership; add_driver(); drive, with handled = ticket() before each look for work; release
/// progress ownership; remove_driver(handled).
class Doorbell {
 public:
  enum class Sleeper : std::uint32_t { kStandby = 1, kDriver = 2 };

  /// Any thread of any process may call it. Makes a system call only if a thread sleeps.
  void ring() noexcept;

  std::uint32_t ticket() const noexcept { return rings_.load(std::memory_order_seq_cst); }
  /// Sleeps until a ring after `ticket` was taken, until `timeout`, or spuriously. A timeout of
  /// zero or less returns at once; Duration::max() waits without limit.
  void sleep(std::uint32_t ticket, Sleeper who, Duration timeout) noexcept;

  /// Registers a driver: from now on rings do not wake the standby sleeper. Calls nest.
  void add_driver() noexcept;
  /// Unregisters a driver: rings wake the standby sleeper again, and a ring after `handled` wakes
  /// it now. Call it after releasing progress ownership; otherwise the woken sleeper finds it taken
  /// and sleeps again. The standby sleeper keeps its timeout, so a driver that leaves an earlier
  /// deadline behind must ring the doorbell.
  void remove_driver(std::uint32_t handled) noexcept;

 private:
  // See Note [No ring is lost] in doorbell.cpp for why every access is sequentially consistent.
  std::atomic<std::uint32_t> rings_{0};  ///< the futex word: number of rings, modulo 2^32
  std::atomic<std::uint32_t> sleepers_{
      0};  ///< standby sleepers in the low half, drivers in the high half
  std::atomic<std::uint32_t> drivers_{0};  ///< active drivers
};

}  // namespace hvd
