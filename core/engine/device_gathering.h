#pragma once

#include <chrono>
#include <optional>

#include "base/clock.h"

namespace hvd::runtime {

/// On rank 0: small tensors of a device gather while it has batches enough in its queue.
///
///   idle --note()--> gathering --let_go(), or too long--> let go
///                        \------------- end() ------------/-> idle
///
/// Nobody has to rely on the device to get further: whoever waits on this rank has them let go, and
/// nothing gathers for longer than a limit, as a program may have its device wait for the host.
///
/// Not thread-safe: the thread that drives the engine. Nothing throws.
class DeviceGathering {
 public:
  /// Several times what batches in a device's queue take.
  static constexpr Duration kLongest = std::chrono::milliseconds(20);

  /// Tensors are held back because the device is busy. It tells nobody when it no longer is, so the
  /// engine has to be asked again and again meanwhile.
  void note(TimePoint now) noexcept {
    if (!since_) since_ = now;
  }
  bool under_way() const noexcept { return since_.has_value(); }
  /// What gathers may go on doing so.
  bool may_last(TimePoint now) const noexcept {
    return !since_ || (!let_go_ && now - *since_ < kLongest);
  }
  /// Somebody waits. @return whether anything is held back that need not be any longer
  bool let_go() noexcept {
    if (!since_ || let_go_) return false;
    return let_go_ = true;
  }
  /// A plan has been made, or nothing is there to gather.
  void end() noexcept {
    since_.reset();
    let_go_ = false;
  }

 private:
  std::optional<TimePoint> since_;
  bool let_go_ = false;
};

}  // namespace hvd::runtime
