#include "engine/channel_queue.h"

#include <utility>

namespace hvd::runtime {

void ChannelQueue::push(std::shared_ptr<Execution> execution) {
  if (next_ > 0 && (empty() || executions_.size() == executions_.capacity())) {
    executions_.erase(executions_.begin(),
                      executions_.begin() + static_cast<std::ptrdiff_t>(next_));
    next_ = 0;
  }
  executions_.push_back(std::move(execution));
}

std::shared_ptr<Execution> ChannelQueue::pop() noexcept {
  HVD_EXPECT(!empty(), "an execution waits or runs");
  ++taken_;
  return std::move(executions_[next_++]);
}

Duration ChannelQueue::standstill(TimePoint now, const std::optional<Headway>& headway) noexcept {
  const auto seen = headway ? std::optional(std::pair(taken_, headway->moves)) : std::nullopt;
  if (!seen || seen != seen_) moved_at_ = now;
  seen_ = seen;
  return now - moved_at_;
}

}  // namespace hvd::runtime
