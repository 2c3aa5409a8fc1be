#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "hvd/collectives.h"
#include "wire/messages.h"

namespace hvd::runtime {

class Runtime;

/// Keeps memory that the transport may still touch until the process ends. See Note [Who frees the buffer].
void keep_for_ever(std::shared_ptr<const void> owner);

/// One submitted operation, shared by the caller's handle and the engine.
///
/// The engine owns everything but done() and status() until done() is true; from then on nothing changes any more.
class OperationState {
 public:
  OperationState(Submission what, wire::Request asked, std::weak_ptr<Runtime> owner, TimePoint now)
      : submission(std::move(what)), request(std::move(asked)), submitted(now), runtime_(std::move(owner)) {}

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  /// @pre done()
  const Status& status() const noexcept { return status_; }
  /// See Operation::result(). @pre done()
  std::int64_t result() const noexcept { return result_; }
  std::shared_ptr<Runtime> runtime() const noexcept { return runtime_.lock(); }

  /// Engine only, before finish().
  void set_result(std::int64_t result) noexcept { result_ = result; }

  /// Engine only, once. Callbacks and the hold on the caller's memory end here.
  void finish(const Status& status, const EventPtr& output_ready);
  /// As finish(), but memory the transport may still touch is kept until the process ends.
  void finish_in_flight(const Status& status);

  Submission submission;
  const wire::Request request;
  const TimePoint submitted;
  std::uint64_t order = 0;  ///< engine only: in which it was begun

 private:
  void call_back(const Status&, const EventPtr&);

  const std::weak_ptr<Runtime> runtime_;
  Status status_;
  std::int64_t result_ = -1;
  std::atomic<bool> done_{false};
};

using OperationPtr = std::shared_ptr<OperationState>;

}  // namespace hvd::runtime
