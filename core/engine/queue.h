#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/expect.h"
#include "engine/batch.h"
#include "engine/staging.h"

namespace hvd::runtime {

class ChannelQueue;

enum class ExecutionState : std::uint8_t { kIdle, kQueued, kPacking, kUnderWay, kUnpacking };

/// A batch on its way through the Executor. Only the Executor changes its state:
///
///   idle --start()--> queued --> packing --launched--> under way --> unpacking --completed--> idle
///
/// A small batch may pass from filled() to idle at once: Note [Filled on arrival] in pipeline.h.
/// A batch of a plan passes through these states once. A replayed batch passes through them once
/// per step, and waits for its operations while it is idle. Used by the thread that drives the
/// engine.
class Execution {
 public:
  Execution(control::AgreedBatch agreed, std::vector<OperationPtr> operations, int world_rank)
      : batch_(std::move(agreed), std::move(operations), world_rank) {}

  const Batch& batch() const noexcept { return batch_; }
  /// Adds this rank's side of an operation. @pre !running()
  void put(std::size_t index, OperationPtr operation) noexcept {
    HVD_EXPECT(!running(), "a batch that runs keeps the operations that it runs for");
    batch_.put(index, std::move(operation));
  }
  /// Whether the execution was started and has not ended.
  bool running() const noexcept { return state_ != ExecutionState::kIdle; }
  /// Whether the input is in memory that the other ranks can read, and the execution has not run
  /// yet.
  bool filled() const noexcept { return filled_; }

 private:
  friend class Executor;

  Batch batch_;
  ChannelQueue* queue_ = nullptr;  // where it runs; null: no data moves
  ExecutionState state_ = ExecutionState::kIdle;
  const Staged* staged_ = nullptr;  // while it is staged
  /// The work that runs. For an idle replayed batch, the last work if it can be started again.
  std::unique_ptr<Work> work_;
  TimePoint agreed_at_ = {};
  TimePoint launched_at_ = {};
  std::uint64_t turn_ = 0;  // among the executions of ordered queues
  bool filled_ = false;
};

/// A channel, its staging, and the executions that run on it one after the other, first in, first
/// out. Used by the thread that drives the engine.
class ChannelQueue {
 public:
  ChannelQueue(std::string backend_name, std::unique_ptr<Channel> opened,
               std::unique_ptr<Staging> into_it, bool in_one_order = false)
      : backend(std::move(backend_name)),
        channel(std::move(opened)),
        staging(std::move(into_it)),
        ordered(in_one_order) {}

  bool empty() const noexcept { return next_ == executions_.size(); }
  /// @pre !empty()
  Execution& front() const noexcept {
    HVD_EXPECT(!empty(), "an execution waits or runs");
    return *executions_[next_];
  }
  void push(std::shared_ptr<Execution> execution);
  /// @pre !empty()
  std::shared_ptr<Execution> pop() noexcept;
  /// The executions that wait or run.
  std::span<const std::shared_ptr<Execution>> executions() const noexcept {
    return std::span(executions_).subspan(next_);
  }
  /// Returns for how long the front has made no progress, as observed by the calls of this
  /// function.
  /// @param progress_count of the front; nullopt: no progress is expected of it now
  Duration stalled_for(TimePoint now, const std::optional<ProgressCount>& progress_count) noexcept;

  std::string backend;  ///< for messages
  std::unique_ptr<Channel> channel;
  std::unique_ptr<Staging> staging;  ///< may use the channel
  /// Whether executions are launched in the order of the plan over all `ordered` queues:
  /// communicators that share a GPU must be used in the same order on every rank.
  bool ordered;
  bool urgent = false;   ///< the second queue of its process set
  bool retired = false;  ///< to be closed once it is empty

 private:
  std::vector<std::shared_ptr<Execution>> executions_;  // its memory is kept
  std::size_t next_ = 0;                                // the first of the queue
  std::uint64_t taken_ = 0;                             // popped so far
  /// At the last stalled_for(): executions popped, and the progress count of the front.
  std::optional<std::pair<std::uint64_t, std::uint64_t>> seen_ = {};
  TimePoint moved_at_{};
};

/// One order over several queues: each execution gets a turn when it is started, and may be
/// launched when all earlier turns have ended.
class LaunchOrder {
 public:
  std::uint64_t next_turn() noexcept { return taken_++; }
  bool is_next(std::uint64_t turn) const noexcept { return turn == ended_; }
  void end_turn() noexcept { ++ended_; }
  /// Ends all turns.
  void end_all() noexcept { ended_ = taken_; }

 private:
  std::uint64_t taken_ = 0;
  std::uint64_t ended_ = 0;
};

/// Batches that are complete for the host and still queued on the device: keeps their memory alive,
/// and detects failures there. Used by the thread that drives the engine.
class DeviceCompletions {
 public:
  /// @param limit how long a batch may be in the queue; zero: no limit
  DeviceCompletions(const Clock& clock, Duration limit) : clock_(clock), limit_(limit) {}

  void add(Channel&, const Batch&, EventPtr output_ready);
  bool empty() const noexcept { return completions_.empty(); }
  bool has(const Channel&) const noexcept;
  /// Drops the batches that have ended, at most every 2 ms. @throws PeerLostError, Error when one
  /// has failed or takes too long
  void check();
  /// When check() has work next; no value when the queue is empty.
  std::optional<TimePoint> next_check() const noexcept;
  /// Keeps the memory until the process ends. See Note [Memory after a failure].
  void abandon() noexcept;

 private:
  struct Completion {
    Channel* channel;
    EventPtr output_ready;
    std::vector<std::shared_ptr<const void>> keep_alive;
    std::string what;
    TimePoint since;
  };
  const Clock& clock_;
  const Duration limit_;
  std::deque<Completion> completions_;
  TimePoint next_check_{};
};

}  // namespace hvd::runtime
