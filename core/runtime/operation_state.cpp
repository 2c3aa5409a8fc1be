#include "runtime/operation_state.h"

#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "base/log.h"
#include "runtime/runtime.h"

namespace hvd {
namespace runtime {
// Note [Who frees the buffer]
// When a collective is cut off by a failure, the transport may still read its input and write its output: MPI cannot take back
// a message that is under way. The owners of such memory move here and stay until the process ends, which after a lost peer is soon.
void keep_for_ever(std::shared_ptr<const void> owner) {
  struct Graveyard {
    std::mutex mutex;
    std::vector<std::shared_ptr<const void>> owners;
  };
  static Graveyard* const graveyard = new Graveyard;
  const std::lock_guard lock(graveyard->mutex);
  graveyard->owners.push_back(std::move(owner));
}

void OperationState::call_back(const Status& status, const EventPtr& output_ready) {
  const auto on_done = std::exchange(submission.on_done, nullptr);
  submission.allocate_output = nullptr;
  if (!on_done) return;
  try {
    on_done(status, output_ready);
  } catch (const std::exception& error) {
    // The callback's contract forbids it; the operation itself is fine.
    HVD_LOG(kError) << "the completion callback of '" << request.name << "' threw: " << error.what();
  }
}

void OperationState::finish(const Status& status, const EventPtr& output_ready) {
  status_ = status;
  call_back(status, output_ready);
  submission.keep_alive.reset();
  done_.store(true, std::memory_order_release);
}

void OperationState::finish_in_flight(const Status& status) {
  keep_for_ever(std::move(submission.keep_alive));
  finish(status, nullptr);
}

}  // namespace runtime

bool Operation::done() const noexcept { return state_ != nullptr && state_->done(); }

const Status& Operation::status() const { return state_->status(); }

std::int64_t Operation::result() const { return state_->result(); }

void Operation::wait() const {
  if (state_ == nullptr) throw UsageError("wait() on an empty operation handle");
  if (state_->done()) return;
  if (const auto runtime = state_->runtime()) runtime->wait(*state_);
}

}  // namespace hvd
