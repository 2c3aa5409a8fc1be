#pragma once

#include <torch/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "hvd/collectives.h"

namespace hvd {

namespace libtorch {
class PendingResult;
}

/// @addtogroup exchange
/// @{

/// An asynchronous operation, or a group of them. Copies refer to the same operation. Destroying
/// all copies does not cancel it. If the caller's tensor is not contiguous, or is cast for
/// compression (float64; outside allreduce also float32), only wait() and wait_all() copy the
/// result to it. Thread-safe.
class Handle {
 public:
  /// An empty handle: valid() is false and wait() throws UsageError.
  Handle() = default;
  explicit Handle(std::shared_ptr<libtorch::PendingResult> result) : result_(std::move(result)) {}

  bool valid() const noexcept { return result_ != nullptr; }
  /// Whether wait() would return at once. False for an empty handle.
  bool done() const noexcept;
  /// Blocks until the operation (or every operation of a group) is done, for at most `timeout`.
  /// Returns whether it is done. Otherwise the operation continues, and can be waited for again. An
  /// error of the operation is thrown by wait() only. @throws UsageError on an empty handle
  bool wait_for(std::chrono::nanoseconds timeout) const;
  /// Describes what the operation, or the first of a group that is not done, waits for: see
  /// Operation::describe_wait(). @throws UsageError on an empty handle
  std::string describe_wait(std::chrono::nanoseconds limit = std::chrono::milliseconds(300)) const;
  /// Blocks until the operation is done and returns its result; for an operation in place, that is
  /// the tensor that was passed. On a GPU it blocks until the operation is queued; the caller's
  /// current stream then waits for the result. Every call, from any thread, returns the same tensor
  /// or throws the same error.
  /// @throws MismatchError, StalledError, PeerLostError, ShutdownError; UsageError on an empty
  /// handle and on one with several results (use wait_all())
  torch::Tensor wait() const;
  /// The results of a group, in the order of its tensors. A single operation has one result,
  /// alltoall_async() has two. @throws as wait()
  std::vector<torch::Tensor> wait_all() const;

 private:
  std::shared_ptr<libtorch::PendingResult> result_;
};

/// Sets a function that every wait for tensors (Handle::wait(), calls that block,
/// wait_with_check(), and waits of c10d::Work) calls about ten times a second on the waiting
/// thread, unless that thread has a BackgroundThread. If the function throws, the wait ends but the
/// operation does not; this is how Python's adapter raises KeyboardInterrupt. Null: no function.
/// Thread-safe.
void set_wait_check(void (*check)()) noexcept;

/// Waits until the operation is done. @throws the exceptions of the function of set_wait_check()
void wait_with_check(const Operation& operation);

/// @}

}  // namespace hvd
