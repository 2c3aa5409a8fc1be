// The handle that a program holds, hvd::Operation.
#include "engine/operations.h"
#include "engine/runtime.h"
#include "hvd/error.h"

namespace hvd {

bool Operation::done() const noexcept { return state_ && state_->done(); }

const Status& Operation::status() const { return state_->status(); }

EventPtr Operation::output_ready() const { return state_->output_ready(); }

std::int64_t Operation::result() const { return state_->result(); }

void Operation::wait() const {
  if (!state_)
    throw UsageError("wait() on an empty operation handle; expected a handle returned by submit()");
  if (state_->done()) return;
  if (const auto runtime = state_->runtime()) runtime->wait(*state_);
}

void Operation::wait(std::chrono::nanoseconds interval, void (*check)()) const {
  if (!state_)
    throw UsageError("wait() on an empty operation handle; expected a handle returned by submit()");
  if (state_->done()) return;
  if (const auto runtime = state_->runtime()) runtime->wait(*state_, interval, check);
}

bool Operation::wait_for(std::chrono::nanoseconds timeout) const {
  if (!state_)
    throw UsageError(
        "wait_for() on an empty operation handle; expected a handle returned by submit()");
  if (state_->done()) return true;
  const auto runtime = state_->runtime();
  return runtime != nullptr && runtime->wait_for(*state_, timeout);
}

std::string Operation::describe_wait(std::chrono::nanoseconds limit) const {
  if (!state_)
    throw UsageError(
        "describe_wait() on an empty operation handle; expected a handle returned by submit()");
  if (state_->done()) return {};
  const auto runtime = state_->runtime();
  return runtime ? runtime->describe_wait(*this, limit) : std::string();
}

}  // namespace hvd
