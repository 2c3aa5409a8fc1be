#include "engine/queue.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/process_exit.h"
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

Duration ChannelQueue::standstill(TimePoint now, const std::optional<Headway>& headway) noexcept {
  const auto seen = headway ? std::optional(std::pair(taken_, headway->moves)) : std::nullopt;
  if (!seen || seen != seen_) moved_at_ = now;
  seen_ = seen;
  return now - moved_at_;
}

namespace {

/// Often enough to free memory and to detect errors, rarely enough to cost little in a step.
constexpr Duration kBetweenLooks = std::chrono::milliseconds(2);

}  // namespace

void DeviceCompletions::add(Channel& channel, const Batch& batch, EventPtr output_ready) {
  Entry entry{&channel, std::move(output_ready), {}, {}, clock_.now()};
  entry.what = control::describe(batch.request());
  for (const OperationPtr& operation : batch.operations()) {
    const Submission& submission = operation->submission;
    if (submission.keep_alive) entry.keep_alive.push_back(submission.keep_alive);
  }
  if (entries_.empty()) next_look_ = entry.since + kBetweenLooks;
  entries_.push_back(std::move(entry));
}

bool DeviceCompletions::has(const Channel& channel) const noexcept {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.channel == &channel; });
}

void DeviceCompletions::look() {
  if (entries_.empty()) return;
  const TimePoint now = clock_.now();
  if (now < next_look_) return;
  next_look_ = now + kBetweenLooks;
  // Batches of one pipeline end in order; those of several pipelines end in any order.
  std::erase_if(entries_, [](const Entry& entry) { return entry.output_ready->query(); });
  const Channel* checked = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.channel != checked) entry.channel->check_health();
    checked = entry.channel;
    if (limit_ == Duration::zero() || now - entry.since < limit_) continue;
    throw PeerLostError(
        entry.what + " has been in the device's queue for " +
            std::to_string(
                std::chrono::duration_cast<std::chrono::seconds>(now - entry.since).count()) +
            " s; expected every rank's GPU to get to it in " +
            std::to_string(std::chrono::duration_cast<std::chrono::seconds>(limit_).count()) +
            " s (HVD_STALL_SHUTDOWN); a rank's GPU hangs, or its program computes for longer than "
            "that",
        -1);
  }
}

std::optional<TimePoint> DeviceCompletions::next_look() const noexcept {
  if (entries_.empty()) return std::nullopt;
  return next_look_;
}

void DeviceCompletions::abandon() noexcept {
  for (Entry& entry : entries_) {
    for (auto& owner : entry.keep_alive) keep_until_exit(std::move(owner));
  }
  entries_.clear();
}

}  // namespace hvd::runtime
