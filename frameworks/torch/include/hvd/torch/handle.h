#pragma once

#include <torch/types.h>

#include <chrono>
#include <memory>
#include <vector>

namespace hvd {

namespace libtorch {
class PendingResult;
}

/// An asynchronous operation, or a group of them. Movable, copyable; copies refer to the same
/// operation. Dropping every copy cancels nothing: the operation completes, but a result that must
/// be copied back into a non-contiguous tensor, or a compressed one of float64 (see
/// allreduce_async_), is copied back by wait() only. Thread-safe.
class Handle {
 public:
  /// Refers to nothing: valid() is false and wait() throws UsageError.
  Handle() = default;
  explicit Handle(std::shared_ptr<libtorch::PendingResult> result) : result_(std::move(result)) {}

  bool valid() const noexcept { return result_ != nullptr; }
  /// Whether wait() would return at once. False for an empty handle.
  bool done() const noexcept;
  /// Blocks until the operation is done, for `timeout` at most, and returns whether it is (of a
  /// group: whether all are). When the time is up the operation goes on, and can be waited for
  /// again. Does not throw the operation's error, which wait() does. @throws UsageError on an empty
  /// handle.
  bool wait_for(std::chrono::nanoseconds timeout) const;
  /// Blocks until the operation is done and returns its result; in place, the tensor that was
  /// passed. On a GPU: until it is queued; the caller's current stream then waits for the result.
  /// May be called again, also from other threads: every call returns the same tensor or
  /// throws the same error.
  /// @throws MismatchError, StalledError, PeerLostError, ShutdownError; UsageError on an empty
  /// handle or one that has not exactly one result (use wait_all()).
  torch::Tensor wait() const;
  /// The results of a group, in the order of its tensors; of a single operation, a vector of one
  /// (of alltoall_async(), of two). Throws as wait() does.
  std::vector<torch::Tensor> wait_all() const;

 private:
  std::shared_ptr<libtorch::PendingResult> result_;
};

}  // namespace hvd
