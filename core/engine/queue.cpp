#include "engine/queue.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/process_exit.h"
#include "base/text.h"
#include "hvd/error.h"
#include "negotiation/validator.h"

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

Duration ChannelQueue::stalled_for(TimePoint now,
                                   const std::optional<ProgressCount>& progress_count) noexcept {
  const auto seen =
      progress_count ? std::optional(std::pair(taken_, progress_count->moves)) : std::nullopt;
  if (!seen || seen != seen_) moved_at_ = now;
  seen_ = seen;
  return now - moved_at_;
}

namespace {

/// Short enough to free memory and detect errors in time, long enough to cost little in a step.
constexpr Duration kCheckInterval = std::chrono::milliseconds(2);

}  // namespace

void DeviceCompletions::add(Channel& channel, const Batch& batch, EventPtr output_ready) {
  Completion completion{&channel, std::move(output_ready), {}, {}, clock_.now()};
  completion.what = control::describe(batch.request());
  for (const OperationPtr& operation : batch.operations()) {
    const Submission& submission = operation->submission;
    if (submission.keep_alive) completion.keep_alive.push_back(submission.keep_alive);
  }
  if (completions_.empty()) next_check_ = completion.since + kCheckInterval;
  completions_.push_back(std::move(completion));
}

bool DeviceCompletions::has(const Channel& channel) const noexcept {
  return std::any_of(completions_.begin(), completions_.end(),
                     [&](const Completion& completion) { return completion.channel == &channel; });
}

void DeviceCompletions::check() {
  if (completions_.empty()) return;
  const TimePoint now = clock_.now();
  if (now < next_check_) return;
  next_check_ = now + kCheckInterval;
  // Batches of one pipeline end in order; those of several pipelines end in any order.
  std::erase_if(completions_,
                [](const Completion& completion) { return completion.output_ready->query(); });
  const Channel* checked = nullptr;
  for (const Completion& completion : completions_) {
    if (completion.channel != checked) completion.channel->check_health();
    checked = completion.channel;
    if (limit_ == Duration::zero() || now - completion.since < limit_) continue;
    throw PeerLostError(
        text(completion.what, " has been in the device's queue for ",
             std::chrono::duration_cast<std::chrono::seconds>(now - completion.since).count(),
             " s; expected every rank's GPU to complete it within ",
             std::chrono::duration_cast<std::chrono::seconds>(limit_).count(),
             " s (HVD_STALL_SHUTDOWN); a rank's GPU hangs, or its program computes for longer than "
             "that"),
        -1);
  }
}

std::optional<TimePoint> DeviceCompletions::next_check() const noexcept {
  if (completions_.empty()) return std::nullopt;
  return next_check_;
}

void DeviceCompletions::abandon() noexcept {
  for (Completion& completion : completions_) {
    for (auto& owner : completion.keep_alive) keep_until_exit(std::move(owner));
  }
  completions_.clear();
}

}  // namespace hvd::runtime
