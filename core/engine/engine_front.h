#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "engine/operation_state.h"
#include "negotiation/process_set_table.h"

namespace hvd::runtime {

/// What any thread may touch of an engine: what the program asks of it, and what has become of it.
///
/// Thread-safe. What is marked so is called by the thread that drives the engine; that the others
/// see it in order is what the rest relies on. Nothing here rings a doorbell. Errors: only the lack
/// of memory is thrown.
class EngineFront {
 public:
  explicit EngineFront(control::ProcessSetTable sets)
      : sets_(std::make_shared<const control::ProcessSetTable>(std::move(sets))) {}

  // --- what the program asks ---
  void enqueue(std::span<const OperationPtr>);
  /// Enqueued, and not taken yet.
  bool has_submissions() const noexcept { return has_submissions_.load(std::memory_order_acquire); }
  std::vector<OperationPtr> submissions() const;
  void request_shutdown() noexcept { shutdown_requested_.store(true); }
  bool shutdown_requested() const noexcept { return shutdown_requested_.load(); }
  /// The process ends without shutdown(). At an exit in order it comes before request_shutdown().
  void note_ending() noexcept { ending_.store(true); }
  bool ending() const noexcept { return ending_.load(); }
  /// A failure that was seen outside the engine; of several the first counts.
  void fail_from_outside(Status);
  /// Async-signal-safe.
  void request_state_dump() noexcept { dump_requested_.store(true); }

  enum class Callbacks : std::uint8_t { kAll, kNone };
  /// Driver. What was enqueued, in that order. kNone: nothing while an operation among it calls the
  /// program back. @param operations empty before; its memory is used for what comes next
  void take(std::vector<OperationPtr>& operations, Callbacks);
  /// Driver. What fail_from_outside() has brought.
  std::optional<Status> outside_failure() const;
  /// Driver. True once for each request.
  bool take_dump_request() noexcept {
    return dump_requested_.load(std::memory_order_relaxed) && dump_requested_.exchange(false);
  }

  // --- what has become of it ---
  /// Driver. Once.
  void set_failed(const Status& cause);
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// The cause. @pre failed()
  Status failure() const;
  /// Driver.
  void set_shut_down() noexcept { shut_down_.store(true, std::memory_order_release); }
  bool shut_down() const noexcept { return shut_down_.load(std::memory_order_acquire); }
  /// Driver. As of the last plan applied.
  void set_process_sets(control::ProcessSetTable);
  std::shared_ptr<const control::ProcessSetTable> process_sets() const;

 private:
  mutable Mutex mutex_;
  std::vector<OperationPtr> submitted_ HVD_GUARDED_BY(mutex_);
  bool callbacks_submitted_ HVD_GUARDED_BY(mutex_) = false;  // some call back
  std::shared_ptr<const control::ProcessSetTable> sets_ HVD_GUARDED_BY(mutex_);
  Status failure_ HVD_GUARDED_BY(mutex_);
  std::optional<Status> outside_failure_ HVD_GUARDED_BY(mutex_);
  std::atomic<bool> has_submissions_{false};
  std::atomic<bool> has_outside_failure_{false};
  std::atomic<bool> shutdown_requested_{false};
  std::atomic<bool> ending_{false};
  std::atomic<bool> dump_requested_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> shut_down_{false};
};

}  // namespace hvd::runtime
