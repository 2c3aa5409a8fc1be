#pragma once

#include <memory>
#include <vector>

#include "backend/nccl/library.h"
#include "base/clock.h"
#include "device/context.h"

namespace hvd::nccl {

/// Ends the communicators of a device on separate threads.
///
/// Note [An abort that cannot hang]: when NCCL ends a communicator it frees device memory, which
/// waits for all work of the device. A kernel of another communicator may wait for a dead peer, so
/// all communicators are aborted as one group. If the driver or a computation of the program hangs,
/// the call never returns. Therefore these calls are made only by threads that may be left behind,
/// and other threads wait for them for a limited time. After that time the device is given up
/// (device::Api::give_up()): its memory stays allocated. The exit of the process is limited too
/// (limit_exit()), because CUDA's exit handlers may also wait for the device.
///
/// Thread-safety is that of hvd::Backend.
class CommTeardown {
 public:
  /// @param limit the longest time that wait() waits
  CommTeardown(std::shared_ptr<Library>, std::shared_ptr<device::Context>, Duration limit);
  CommTeardown(const CommTeardown&) = delete;
  CommTeardown& operator=(const CommTeardown&) = delete;
  /// Calls wait().
  ~CommTeardown();

  /// Adds a communicator for abort_all() to end.
  void add(Comm);
  /// Begins to abort all communicators that were added and not ended.
  void abort_all() noexcept;
  /// Begins to abort this communicator.
  void abort(Comm) noexcept;
  /// Begins to free a communicator whose begin_finalize() is complete.
  void destroy(Comm) noexcept;
  /// Waits until all calls that were begun have returned. @return false if the limit has passed,
  /// now or earlier; the device is then given up
  bool wait() noexcept;

 private:
  struct Ending;
  /// @param aborts false: destroys the communicator, which must be the only one
  void begin(std::vector<Comm>, bool aborts) noexcept;
  void give_up(const char* why) noexcept;

  const std::shared_ptr<Library> library_;
  const std::shared_ptr<device::Context> device_;
  const Duration limit_;
  std::vector<Comm> comms_;                       // added and not ended
  std::vector<std::shared_ptr<Ending>> endings_;  // begun, perhaps still running
};

}  // namespace hvd::nccl
