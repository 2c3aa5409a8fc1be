#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "execution/execution.h"
#include "execution/staging.h"
#include "hvd/backend.h"

namespace hvd::runtime {

/// First in, first out. Keeps its memory.
class ExecutionQueue {
 public:
  bool empty() const noexcept { return head_ == executions_.size(); }
  Execution& front() const noexcept { return *executions_[head_]; }
  void push(std::shared_ptr<Execution> execution);
  std::shared_ptr<Execution> pop() noexcept;
  std::span<const std::shared_ptr<Execution>> executions() const noexcept {
    return std::span(executions_).subspan(head_);
  }

 private:
  std::vector<std::shared_ptr<Execution>> executions_;
  std::size_t head_ = 0;  // what is before it has been taken
};

/// A channel, the way to it, and what is to run on it, one after the other.
struct ChannelQueue {
  std::string backend;  ///< for messages
  std::unique_ptr<Channel> channel;
  std::unique_ptr<Staging> staging;  ///< may use the channel
  /// Its executions are launched in one order over all queues that are `ordered`, the plan's:
  /// communicators that share a GPU must be used in the same order everywhere.
  bool ordered = false;
  /// Nothing is launched unless the device is current. See Note [The device of MPI's calls].
  bool carries_device_memory = false;
  ExecutionQueue pending = {};
  bool retired = false;  ///< it is closed once what was started has ended
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
