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

/// A batch on its way through the Executor, which alone moves it on:
///
///   idle --start()--> queued --> packing --launched--> under way --> unpacking --completed--> idle
///
/// One that is not replayed goes that way once. A replayed one waits for its operations while it is
/// idle. Used by the thread that drives the engine.
class Execution {
 public:
  Execution(control::AgreedBatch agreed, std::vector<OperationPtr> operations, int world_rank)
      : batch_(std::move(agreed), std::move(operations), world_rank) {}

  const Batch& batch() const noexcept { return batch_; }
  /// This rank's side of an operation is there. @pre !running()
  void put(std::size_t index, OperationPtr operation) noexcept {
    HVD_EXPECT(!running(), "a batch that runs keeps the operations that it runs for");
    batch_.put(index, std::move(operation));
  }
  /// It has been started and has not ended.
  bool running() const noexcept { return phase_ != Phase::kIdle; }

 private:
  friend class Executor;
  enum class Phase { kIdle, kQueued, kPacking, kUnderWay, kUnpacking };

  Batch batch_;
  ChannelQueue* queue_ = nullptr;  // where it runs; null: there is nothing to run
  Phase phase_ = Phase::kIdle;
  const Staged* staged_ = nullptr;  // while it is staged
  /// Of a replayed one that is not under way: the last, if it can be started again.
  std::unique_ptr<Work> work_;
  TimePoint agreed_at_ = {};
  TimePoint launched_at_ = {};
  std::uint64_t turn_ = 0;  // among the executions of ordered queues
};

/// A channel, the way to it, and what is to run on it, one after the other, first in, first out.
///
/// Used by the thread that drives the engine.
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
  /// Those that wait or run.
  std::span<const std::shared_ptr<Execution>> executions() const noexcept {
    return std::span(executions_).subspan(next_);
  }
  /// For how long, as far as calls of this show, what is at the front has got no further.
  /// @param headway of the front; nullopt: none is expected of it now
  Duration standstill(TimePoint now, const std::optional<Headway>& headway) noexcept;

  std::string backend;  ///< for messages
  std::unique_ptr<Channel> channel;
  std::unique_ptr<Staging> staging;  ///< may use the channel
  /// Its executions are launched in one order over all queues that are `ordered`, the plan's:
  /// communicators that share a GPU must be used in the same order everywhere.
  bool ordered;
  bool urgent = false;   ///< beside the one where batches of its process set queue
  bool retired = false;  ///< it is closed once what was started has ended

 private:
  std::vector<std::shared_ptr<Execution>> executions_;  // its memory is kept
  std::size_t next_ = 0;                                // what is before it has been taken
  std::uint64_t taken_ = 0;                             // by pop() so far
  /// At the last standstill(): executions taken, and moves of the one at the front.
  std::optional<std::pair<std::uint64_t, std::uint64_t>> seen_ = {};
  TimePoint moved_at_{};
};

/// The one order over several queues: each execution takes a turn when it is started, and may be
/// launched when all turns before its own have ended.
class LaunchOrder {
 public:
  std::uint64_t take_turn() noexcept { return taken_++; }
  bool has_come(std::uint64_t turn) const noexcept { return turn == ended_; }
  void end_turn() noexcept { ++ended_; }
  /// All turns that were taken are over.
  void end_all() noexcept { ended_ = taken_; }

 private:
  std::uint64_t taken_ = 0;
  std::uint64_t ended_ = 0;
};

/// Batches that are complete for the host and still queued on the device: keeps their memory alive,
/// and notices when one fails there. Used by the thread that drives the engine.
class DeviceCompletions {
 public:
  /// @param limit how long anything may be in the queue; zero: forever
  DeviceCompletions(const Clock& clock, Duration limit) : clock_(clock), limit_(limit) {}

  void add(Channel&, const Batch&, EventPtr output_ready);
  bool empty() const noexcept { return entries_.empty(); }
  bool has(const Channel&) const noexcept;
  /// Looks, now and then, which have come to their end. @throws PeerLostError, Error when one has
  /// failed or takes too long
  void look();
  /// When to look next; nothing when nothing is in the queue.
  std::optional<TimePoint> next_look() const noexcept;
  /// The memory is kept until the process ends. See Note [Who frees the buffer].
  void abandon() noexcept;

 private:
  struct Entry {
    Channel* channel;
    EventPtr output_ready;
    std::vector<std::shared_ptr<const void>> keep_alive;
    std::string what;
    TimePoint since;
  };
  const Clock& clock_;
  const Duration limit_;
  std::deque<Entry> entries_;
  TimePoint next_look_{};
};

}  // namespace hvd::runtime
