#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/expect.h"
#include "engine/execution.h"
#include "engine/staging.h"

namespace hvd::runtime {

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

}  // namespace hvd::runtime
