#pragma once

#include <memory>
#include <vector>

#include "backend/nccl/library.h"
#include "base/clock.h"
#include "device/context.h"

namespace hvd::nccl {

/// Ends the communicators of a device on threads of their own.
///
/// Note [An abort that cannot hang]: NCCL frees memory of the device when it ends a communicator,
/// and that waits for everything that the device runs. A kernel of another communicator may wait
/// for a dead peer, so all communicators are aborted as one group; and where a computation of the
/// program's hangs, or the driver, the call never returns. So nobody calls NCCL for it but a thread
/// that is left behind if need be, and whoever needs to know waits for it for so long and no
/// longer. Then the device is given up (device::Api::give_up()): what is on it stays allocated, and
/// the process's end is watched, since CUDA's own may wait for the device too.
///
/// Used as hvd::Backend says.
class CommTeardown {
 public:
  /// @param limit for wait()
  CommTeardown(std::shared_ptr<Library>, std::shared_ptr<device::Context>, Duration limit);
  CommTeardown(const CommTeardown&) = delete;
  CommTeardown& operator=(const CommTeardown&) = delete;
  /// As wait().
  ~CommTeardown();

  /// There is one more.
  void add(Comm);
  /// Begins to abort all that there are, and returns.
  void abort_all() noexcept;
  /// Begins to abort this one, and returns.
  void abort(Comm) noexcept;
  /// Begins to free one whose begin_finalize() is over, and returns.
  void destroy(Comm) noexcept;
  /// Waits until all that was begun is over. False: it took longer than the limit, now or once
  /// before, and the device is given up.
  bool wait() noexcept;

 private:
  struct Ending;
  using End = void (*)(Library&, const std::vector<Comm>&);
  void begin(std::vector<Comm>, End) noexcept;
  void give_up(const char* why) noexcept;

  const std::shared_ptr<Library> library_;
  const std::shared_ptr<device::Context> device_;
  const Duration limit_;
  std::vector<Comm> comms_;                       // that nobody ends yet
  std::vector<std::shared_ptr<Ending>> endings_;  // that nobody has seen the end of
};

}  // namespace hvd::nccl
