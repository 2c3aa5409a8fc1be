#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "c10d/completions.h"
#include "c10d/flight_record.h"
#include "hvd/status.h"
#include "hvd/torch/handle.h"

namespace hvd::libtorch {

/// Converts an error of the job to c10::DistBackendError, which programs with torch.distributed
/// catch. Other exceptions are unchanged.
std::exception_ptr torch_error(const std::exception_ptr& error);

/// Calls `function`, and converts its exception with torch_error().
template <class Function>
auto with_torch_errors(const Function& function) {
  try {
    return function();
  } catch (...) {
    std::rethrow_exception(torch_error(std::current_exception()));
  }
}

/// Runs the function of set_return_check().
void check_return() noexcept;

/// One call of the backend: the started operation, and the properties of its c10d::Work.
struct Launch {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  const char* title = nullptr;  ///< of the profiler's event: "hvd:all_reduce"
  bool asynchronous = true;     ///< false: the caller waits immediately
  std::chrono::milliseconds timeout = std::chrono::milliseconds(-1);  ///< negative: the group's
  Handle handle = {};
  /// For the flight record. No value: the outputs. Valid during the start only.
  std::optional<at::TensorList> inputs = {};
  std::vector<at::Tensor> outputs = {};
  /// Whether results are copied to the outputs after the operation. The work then completes even
  /// without a further call of its caller.
  bool copies = false;
  /// For send and recv: returns the group's rank that has sent the message, once it has arrived.
  std::function<int()> source = {};
  int peer = 0;  ///< of send and recv, as a rank of the group
  /// Runs once when the operation has succeeded. May be null.
  std::function<void(const std::vector<at::Tensor>& results)> finish = {};
};

/// A c10d::Work over hvd's handle. Thread-safe.
///
/// With tensors on a GPU an operation is done when it is queued there. Each waiter's current stream
/// then waits for the results; the host does not.
class PendingWork final : public c10d::Work {
 public:
  /// @param entry of the operation in the flight record
  PendingWork(int rank, Launch launch, std::uint64_t sequence, FlightRecord::Entry entry,
              std::shared_ptr<Completions> completions);

  /// Does not wait. Copies the results if the operation is done. On a GPU: whether the device has
  /// the results.
  bool isCompleted() override;
  /// @param timeout from now, until the results are available, also on a GPU; zero: the operation's
  /// timeout, counted from its start, until the operation is done
  /// @throws c10::DistBackendError for an error of the job or a timeout, after which the operation
  /// continues; UsageError
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return launch_.outputs; }
  /// The group's rank that has sent the message; for a send or recv that has succeeded.
  int sourceRank() const override { return launch_.source ? launch_.source() : Work::sourceRank(); }
  /// The outputs, or the error that wait() throws. Callbacks run on a thread of the backend, in
  /// streams of LibTorch's pool, and may start and wait for operations.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

  /// For Completions: waits until the operation is done or its timeout has passed.
  void await_for_future();
  /// Completes the future with the result, or with a timeout error if the operation is not done.
  /// The callbacks of the future run in this call.
  void complete_future();

 private:
  using TimePoint = std::chrono::steady_clock::time_point;
  TimePoint deadline() const;
  /// Copies the results, once, in the current stream. @pre the operation is done
  void settle();
  /// Makes the current stream wait for the results on the GPU. @return an event after them; null
  /// before settle(), and without a GPU
  EventPtr current_stream_follows();
  /// Makes the error of a timeout: asks the other ranks what the operation waits for, and writes
  /// the flight record. Null: the operation is done by now.
  std::exception_ptr timeout_error(std::chrono::milliseconds timeout) const;
  std::exception_ptr device_timeout_error(std::chrono::milliseconds timeout) const;

  Launch launch_;
  const std::optional<c10::Device> gpu_;  // of the tensors
  const std::uint64_t sequence_;
  const FlightRecord::Entry entry_;
  const TimePoint started_ = std::chrono::steady_clock::now();
  const std::shared_ptr<Completions> completions_;
  std::mutex settle_mutex_;  // std::call_once would make a system call in each operation
  bool settled_ = false;     // guarded by settle_mutex_
  EventPtr on_device_;       // after the results on the GPU; guarded by settle_mutex_
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // guarded by future_mutex_
};

}  // namespace hvd::libtorch
