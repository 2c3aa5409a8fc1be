#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/expect.h"
#include "base/mutex.h"
#include "hvd/collectives.h"
#include "negotiation/messages.h"
#include "negotiation/process_set_table.h"
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

/// What any thread may touch of an engine: what the program asks of it, and what has become of it.
///
/// Thread-safe. What is marked so is called by the thread that drives the engine; that the others
/// see it in order is what the rest relies on. Nothing here rings a doorbell. Errors: only the lack
/// of memory is thrown.
class EngineFront {
 public:
  explicit EngineFront(control::ProcessSetTable sets)
      : sets_(std::make_shared<const control::ProcessSetTable>(std::move(sets))) {}

  // --- what the program asks ---
  void enqueue(std::span<const OperationPtr>);
  /// Enqueued, and not taken yet.
  bool has_submissions() const noexcept { return has_submissions_.load(std::memory_order_acquire); }
  std::vector<OperationPtr> submissions() const;
  void request_shutdown() noexcept { shutdown_requested_.store(true); }
  bool shutdown_requested() const noexcept { return shutdown_requested_.load(); }
  /// The process ends without shutdown(). At an exit in order it comes before request_shutdown().
  void note_ending() noexcept { ending_.store(true); }
  bool ending() const noexcept { return ending_.load(); }
  /// A failure that was seen outside the engine; of several the first counts.
  void fail_from_outside(Status);
  /// Async-signal-safe.
  void request_state_dump() noexcept { dump_requested_.store(true); }

  enum class Callbacks : std::uint8_t { kAll, kNone };
  /// Driver. What was enqueued, in that order. kNone: nothing while an operation among it calls the
  /// program back. @param operations empty before; its memory is used for what comes next
  void take(std::vector<OperationPtr>& operations, Callbacks);
  /// Driver. What fail_from_outside() has brought.
  std::optional<Status> outside_failure() const;
  /// Driver. True once for each request.
  bool take_dump_request() noexcept {
    return dump_requested_.load(std::memory_order_relaxed) && dump_requested_.exchange(false);
  }

  // --- what has become of it ---
  /// Driver. Once.
  void set_failed(const Status& cause);
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// The cause. @pre failed()
  Status failure() const;
  /// Driver.
  void set_shut_down() noexcept { shut_down_.store(true, std::memory_order_release); }
  bool shut_down() const noexcept { return shut_down_.load(std::memory_order_acquire); }
  /// Driver. As of the last plan applied.
  void set_process_sets(control::ProcessSetTable);
  std::shared_ptr<const control::ProcessSetTable> process_sets() const;

 private:
  mutable Mutex mutex_;
  std::vector<OperationPtr> submitted_ HVD_GUARDED_BY(mutex_);
  bool callbacks_submitted_ HVD_GUARDED_BY(mutex_) = false;  // some call back
  std::shared_ptr<const control::ProcessSetTable> sets_ HVD_GUARDED_BY(mutex_);
  Status failure_ HVD_GUARDED_BY(mutex_);
  std::optional<Status> outside_failure_ HVD_GUARDED_BY(mutex_);
  std::atomic<bool> has_submissions_{false};
  std::atomic<bool> has_outside_failure_{false};
  std::atomic<bool> shutdown_requested_{false};
  std::atomic<bool> ending_{false};
  std::atomic<bool> dump_requested_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> shut_down_{false};
};

/// The operations of a rank by process set and name: those in flight, whose names are taken, and
/// those that may come again, whose states are then used again. Gives unnamed ones their numbers.
///
/// Thread-safe.
class OperationTable {
 public:
  /// @param front where operations go; outlives this
  /// @param rank this one, among all of the job
  /// @param gpu this rank's, as this process counts them
  OperationTable(EngineFront& front, int rank, std::optional<int> gpu)
      : front_(front), rank_(rank), gpu_(gpu) {}

  /// Makes operations and hands them to the engine, all or none.
  /// @param handles as many; they hold nothing
  /// @param owner whom the operations' waiters ask to drive
  /// @throws UsageError; the cause of failure when the engine has failed; ShutdownError once
  /// shutdown was requested
  void submit(std::span<const Submission>, std::span<Operation> handles,
              const std::weak_ptr<Runtime>& owner, TimePoint now);
  /// The operation has ended: its name may be used again. Ignores an operation that was not made
  /// here.
  void release(OperationState&);
  /// Some operation in flight calls the program back.
  bool calls_back() const noexcept { return callbacks_.load(std::memory_order_relaxed) != 0; }
  /// Whoever is in submit() has left it when this returns.
  void wait_for_submissions() { const MutexLock lock(mutex_); }

 private:
  using Key = std::pair<int, std::string_view>;  // the name is that of the operation's request
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      return std::hash<std::string_view>()(key.second) ^
             (static_cast<std::size_t>(key.first) * 0x9E3779B97F4A7C15u);
    }
  };

  void check_running() const;
  OperationPtr claim(const Submission&, const std::weak_ptr<Runtime>&, TimePoint now)
      HVD_REQUIRES(mutex_);
  OperationPtr claim_again(const Submission&, TimePoint now) HVD_REQUIRES(mutex_);
  wire::Request number(const Submission&) HVD_REQUIRES(mutex_);
  void take_back() HVD_REQUIRES(mutex_);
  void forget(const wire::Request&) HVD_REQUIRES(mutex_);
  void remember(OperationState&) HVD_REQUIRES(mutex_);
  void unlink(OperationState&) HVD_REQUIRES(mutex_);

  EngineFront& front_;
  const int rank_;
  const std::optional<int> gpu_;
  std::atomic<int> callbacks_{0};  // operations in flight that call the program back

  Mutex mutex_;
  std::unordered_map<Key, OperationPtr, Hash> operations_ HVD_GUARDED_BY(mutex_);
  // Those of operations_ that have ended, in the order in which they did.
  OperationState* first_released_ HVD_GUARDED_BY(mutex_) = nullptr;
  OperationState* last_released_ HVD_GUARDED_BY(mutex_) = nullptr;
  std::vector<OperationPtr> claimed_ HVD_GUARDED_BY(mutex_);  // by the submit() that holds it
  std::map<std::pair<int, OpKind>, std::uint64_t> ordinals_
      HVD_GUARDED_BY(mutex_);                       // of unnamed operations
  std::uint64_t joins_ HVD_GUARDED_BY(mutex_) = 0;  // that have succeeded
  bool joined_ HVD_GUARDED_BY(mutex_) = false;      // a join() is in flight
};

}  // namespace hvd::runtime
