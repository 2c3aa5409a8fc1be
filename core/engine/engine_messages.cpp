// Passes a small message to a thread of another rank that waits for it: see QuickMessages.
#include <sched.h>

#include <functional>
#include <optional>

#include "engine/engine.h"

namespace hvd::runtime {
namespace {

/// A thread that passes messages in a loop drives the engine once in this many calls. Heartbeats
/// and control messages then continue even if the engine thread is not scheduled.
constexpr int kCallsPerStep = 64;

}  // namespace

std::optional<int> Engine::pass_quickly(const Message& message,
                                        const std::function<bool()>& wanted) noexcept {
  if (++quick_calls_ >= kCallsPerStep) {
    quick_calls_ = 0;
    step();
  }
  const auto other_work = [this]() HVD_REQUIRES(progress_) {
    return submission_queue_.has_submissions() || control_->has_local_message();
  };
  const auto& sets = negotiator_.process_sets();
  if (busy() || other_work() || submission_queue_.failed() ||
      submission_queue_.shutdown_requested() || !quick_.accepts(message, sets))
    return std::nullopt;
  std::optional<int> peer;
  if (message.direction == Direction::kSend) {
    const auto drive = [this]() HVD_REQUIRES(progress_) {
      step();
      sched_yield();
      return !submission_queue_.failed();
    };
    if (quick_.send(message, drive)) peer = message.peer;
  } else if (points_.has_no_earlier(message.process_set, message.tag)) {
    const auto interrupted = [&]() HVD_REQUIRES(progress_) { return other_work() || wanted(); };
    peer = quick_.receive(message, sets, interrupted);
  }
  if (!peer) return std::nullopt;
  if (message.direction == Direction::kSend) counters_.bytes.add(message.tensor.bytes());
  counters_.completed_operations.add(1);
  last_quick_ =
      MessageSide{message.direction, message.peer, {message.process_set, {}, message.tag}};
  return peer;
}

}  // namespace hvd::runtime
