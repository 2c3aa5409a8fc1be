#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/expect.h"
#include "hvd/collectives.h"
#include "negotiation/messages.h"
#include "negotiation/schedule_replay.h"

namespace hvd::runtime {

class Runtime;

/// One submitted operation, shared by the caller's handle and the engine.
///
/// The engine owns everything but done() and status() until done() is true; from then on nothing
/// changes any more, until the state is used for the next operation of the same name:
/// begin_again().
class OperationState {
 public:
  OperationState(const Submission& what, wire::Request asked, std::weak_ptr<Runtime> owner,
                 TimePoint now)
      : submission(what), request(std::move(asked)), submitted(now), runtime_(std::move(owner)) {}
  OperationState(const OperationState&) = delete;
  OperationState& operator=(const OperationState&) = delete;

  /// For the same operation once more: `what` asks_for_the_same(). @pre over()
  void begin_again(const Submission& what, TimePoint now);
  /// Done, and no handle of the program is left that could ask how it ended. (The engine may still
  /// hold a reference.)
  bool over() const noexcept {
    return done() && holders_.load(std::memory_order_acquire) % kInternal == 0;
  }

  /// It has a callback into the program, which is gone at its end. @pre !done()
  bool calls_back() const noexcept {
    HVD_EXPECT(!done(), "the operation has not ended");
    return submission.on_done != nullptr || submission.allocate_output != nullptr;
  }
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  /// @pre done()
  const Status& status() const noexcept {
    HVD_EXPECT(done(), "the operation has ended");
    return status_;
  }
  /// See Operation::output_ready(). @pre done()
  const EventPtr& output_ready() const noexcept {
    HVD_EXPECT(done(), "the operation has ended");
    return output_ready_;
  }
  /// See Operation::result(). Once done(), or the engine before.
  std::int64_t result() const noexcept { return result_; }
  std::shared_ptr<Runtime> runtime() const noexcept { return runtime_.lock(); }

  /// Engine only, before finish().
  void set_result(std::int64_t result) noexcept { result_ = result; }

  /// Engine only, once per use. Callbacks and the hold on the caller's memory end here.
  void finish(const Status& status, const EventPtr& output_ready);
  /// As finish(), but memory the transport may still touch is kept until the process ends.
  void finish_in_flight(const Status& status);

  Submission submission;
  const wire::Request request;
  TimePoint submitted;
  std::uint64_t order = 0;            ///< engine only: in which it was begun
  control::SchedulePlace place = {};  ///< engine only: in the schedule that is replayed, or was
  bool in_flight = false;             ///< OperationTable only: its name is taken
  /// OperationTable only: its neighbours in the list of those that may come again.
  OperationState* released_before = nullptr;
  OperationState* released_after = nullptr;

 private:
  friend void retain(OperationState*, std::uint64_t unit) noexcept;
  friend void release(OperationState*, std::uint64_t unit) noexcept;
  void call_back(const Status&, const EventPtr&);

  const std::weak_ptr<Runtime> runtime_;
  Status status_;
  EventPtr output_ready_;
  std::int64_t result_ = -1;
  std::atomic<bool> done_{false};
  std::atomic<std::uint64_t> holders_{
      0};  ///< of the program in units of kHandle, others in units of kInternal
};

/// Each of its parts has memory, and they lie in ascending order within the tensor.
bool parts_fit(const Submission&) noexcept;

/// What `what` asks for is what the request says, and nothing that make_request() would find wrong.
/// Only for the set of all ranks.
bool asks_for_the_same(const Submission& what, const Submission& before,
                       const wire::Request&) noexcept;

}  // namespace hvd::runtime
