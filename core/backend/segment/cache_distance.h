#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace hvd::segment {

/// Estimates whether the core of another member is so far away that streaming stores are the faster
/// way to send it data. If the two cores are on one chip, a load of a line that the other core has
/// written takes 20 to 110 ns; if they are on different chiplets or sockets, 100 to 300 ns.
/// Processes move between cores, so the estimate follows the newest measurements. See
/// docs/decisions/0044-streaming-stores.md.
///
/// Not thread-safe.
class CacheDistance {
 public:
  using Nanoseconds = std::chrono::nanoseconds;

  CacheDistance() noexcept;

  bool far() const noexcept { return far_; }
  /// Loads a counter that another member writes, and measures how long that takes.
  std::uint64_t load(const std::atomic<std::uint64_t>& counter) noexcept;
  /// Takes the time of one load into account.
  void add(Nanoseconds) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  Nanoseconds overhead_;  ///< of reading the clock twice
  int balance_ = 0;       ///< far loads minus near ones, within +-kDecisive
  bool far_ = false;
};

}  // namespace hvd::segment
