#include "execution/channel_queue.h"

#include <utility>

namespace hvd::runtime {

void ExecutionQueue::push(std::shared_ptr<Execution> execution) {
  if (head_ > 0 && (empty() || executions_.size() == executions_.capacity())) {
    executions_.erase(executions_.begin(),
                      executions_.begin() + static_cast<std::ptrdiff_t>(head_));
    head_ = 0;
  }
  executions_.push_back(std::move(execution));
}

std::shared_ptr<Execution> ExecutionQueue::pop() noexcept {
  return std::move(executions_[head_++]);
}

}  // namespace hvd::runtime
