#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
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
#include "hvd/point_to_point.h"
#include "negotiation/messages.h"
#include "negotiation/point_messages.h"
#include "negotiation/process_set_table.h"
#include "negotiation/schedule_replay.h"

namespace hvd::runtime {

class Runtime;
class WaitDescription;

/// The message data of a send or recv.
struct MessageSide {
  Direction direction = Direction::kSend;
  int peer = 0;  ///< world rank, or control::kAnyRank
  wire::MessageKey key = {};

  bool sends() const noexcept { return direction == Direction::kSend; }
};
/// For error texts: "send (tag 5) to rank 1", "recv ('x') from any rank".
std::string describe(const MessageSide&);

/// One submitted operation, shared by the caller's handle and the engine.
///
/// Until done() is true, only the engine may use the members other than done() and status().
/// Afterwards the state stays unchanged until begin_again() reuses it for the next operation of the
/// same name.
class OperationState {
 public:
  OperationState(const Submission& what, wire::Request asked, std::weak_ptr<Runtime> owner,
                 TimePoint now)
      : submission(what), request(std::move(asked)), submitted(now), runtime_(std::move(owner)) {}
  /// A send or recv. Its `submission` has the tensor, as input or output, and the callback; its
  /// `request` is not used.
  OperationState(const Message&, std::weak_ptr<Runtime> owner, TimePoint now);
  OperationState(const OperationState&) = delete;
  OperationState& operator=(const OperationState&) = delete;

  /// Reuses the state for the same operation. @pre over(kept), and is_same_operation() for `what`
  void begin_again(const Submission& what, TimePoint now, std::uint64_t kept);
  /// Whether the operation is done and the program holds no more than `kept` handles to it. (The
  /// engine may still hold a reference.)
  bool over(std::uint64_t kept = 0) const noexcept {
    return done() && holders_.load(std::memory_order_acquire) % kInternal <= kept;
  }

  /// Whether the operation calls the program back when it ends. @pre !done()
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
  /// See Operation::result(). The engine may read it before done().
  std::int64_t result() const noexcept { return result_; }
  std::shared_ptr<Runtime> runtime() const noexcept { return runtime_.lock(); }
  /// For error texts: kind and name.
  std::string title() const;

  /// Engine only, before finish().
  void set_result(std::int64_t result) noexcept { result_ = result; }

  /// Engine only, once per use. Calls the program back and releases the caller's memory.
  void finish(const Status& status, const EventPtr& output_ready);
  /// Like finish(), but memory that the transport may still use is kept until the process ends.
  void finish_in_flight(const Status& status);

  Submission submission;
  const wire::Request request;
  const std::unique_ptr<const MessageSide> message;  ///< null: a collective
  TimePoint submitted;
  std::uint64_t order = 0;             ///< engine only: the order in which operations were begun
  control::SchedulePlace place = {};   ///< engine only: in the current or last schedule
  std::atomic<bool> in_flight{false};  ///< OperationTable only: its name is in use
  /// OperationTable only: links of the list of known operations.
  OperationState* used_before = nullptr;
  OperationState* used_after = nullptr;
  OperationState* queued_before = nullptr;  ///< SubmissionQueue only: link of its list

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
      0};  ///< handles of the program in units of kHandle, others in units of kInternal
};

/// Whether each part has memory and the parts lie in ascending order within the tensor.
bool parts_fit(const Submission&) noexcept;

/// Whether `what` is the same operation as `before`, whose request is given, and make_request()
/// would accept `what`. False for every process set except the set of all ranks.
bool is_same_operation(const Submission& what, const Submission& before,
                       const wire::Request&) noexcept;

/// The part of an engine that any thread may use: the submitted operations, the program's requests,
/// and whether the engine has failed or shut down.
///
/// Thread-safe. Functions marked "Driver" are called only by the thread that drives the engine. No
/// function rings a doorbell. Errors: only std::bad_alloc is thrown.
class SubmissionQueue {
 public:
  explicit SubmissionQueue(control::ProcessSetTable sets)
      : sets_(std::make_shared<const control::ProcessSetTable>(std::move(sets))) {}
  SubmissionQueue(const SubmissionQueue&) = delete;
  SubmissionQueue& operator=(const SubmissionQueue&) = delete;
  ~SubmissionQueue();

  // --- requests of the program ---
  /// Moves the operations to the queue. Ignores empty places.
  void enqueue(std::span<OperationPtr>) noexcept;
  /// Whether operations are queued that pop_all() has not returned yet.
  bool has_submissions() const noexcept {
    return newest_.load(std::memory_order_acquire) != nullptr;
  }
  void request_shutdown() noexcept { shutdown_requested_.store(true); }
  bool shutdown_requested() const noexcept { return shutdown_requested_.load(); }
  /// Records that the process ends without having called shutdown(). In an orderly exit it is
  /// called before request_shutdown().
  void mark_ending() noexcept { ending_.store(true); }
  bool ending() const noexcept { return ending_.load(); }
  /// Reports a failure that was found outside the engine. Only the first one counts.
  void fail_from_outside(Status);
  /// Requests a text from the engine about what an operation waits for.
  void request_description(std::shared_ptr<WaitDescription>);
  /// Async-signal-safe.
  void request_state_dump() noexcept { dump_requested_.store(true); }

  enum class Callbacks : std::uint8_t { kAll, kNone };
  /// Driver. Moves all queued operations to `operations`, in their order. With kNone it moves no
  /// operation while one of the queued operations has a callback. @param operations empty
  void pop_all(std::vector<OperationPtr>& operations, Callbacks);
  /// Driver. Copies of all queued operations, in their order.
  std::vector<OperationPtr> queued() const;
  /// Driver. The cause that fail_from_outside() was given.
  std::optional<Status> outside_failure() const;
  bool has_description_requests() const noexcept {
    return has_description_requests_.load(std::memory_order_acquire);
  }
  /// Driver. Removes and returns the requested descriptions.
  std::vector<std::shared_ptr<WaitDescription>> pop_description_requests();
  /// Driver. True once after each request_state_dump().
  bool consume_dump_request() noexcept {
    return dump_requested_.load(std::memory_order_relaxed) && dump_requested_.exchange(false);
  }

  // --- state of the engine ---
  /// Driver. Once.
  void set_failed(const Status& cause);
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// The cause. @pre failed()
  Status failure() const;
  /// Driver.
  void set_shut_down() noexcept { shut_down_.store(true, std::memory_order_release); }
  bool shut_down() const noexcept { return shut_down_.load(std::memory_order_acquire); }
  /// Driver. The sets as of the last applied plan.
  void set_process_sets(control::ProcessSetTable);
  std::shared_ptr<const control::ProcessSetTable> process_sets() const;

 private:
  // The queued operations, linked from the newest to the oldest. Any thread adds, and the driver
  // takes all of them, so no operation is in the list twice.
  std::atomic<OperationState*> newest_{nullptr};
  mutable Mutex mutex_;
  std::shared_ptr<const control::ProcessSetTable> sets_ HVD_GUARDED_BY(mutex_);
  Status failure_ HVD_GUARDED_BY(mutex_);
  std::optional<Status> outside_failure_ HVD_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<WaitDescription>> descriptions_ HVD_GUARDED_BY(mutex_);
  std::atomic<bool> has_outside_failure_{false};
  std::atomic<bool> has_description_requests_{false};
  std::atomic<bool> shutdown_requested_{false};
  std::atomic<bool> ending_{false};
  std::atomic<bool> dump_requested_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> shut_down_{false};
};

/// The operations of a rank by process set and name: those in flight, and ended ones, whose states
/// are reused when the same operation is submitted again. Numbers the unnamed operations.
///
/// Thread-safe.
class OperationTable {
 public:
  /// @param queue where operations go; outlives this
  /// @param rank this rank's number in the job
  /// @param gpu the index of this rank's GPU in this process
  OperationTable(SubmissionQueue& queue, int rank, std::optional<int> gpu)
      : queue_(queue), rank_(rank), gpu_(gpu) {}

  /// Makes operations and queues them for the engine. If it throws, no operation is queued.
  /// @param handles one per submission; those that they held are released first, except the handle
  /// to the last use of the same name, which then refers to the new use
  /// @param owner the runtime that the operations' waiters drive
  /// @throws UsageError; the cause of failure when the engine has failed; ShutdownError once
  /// shutdown was requested
  void submit(std::span<const Submission>, std::span<Operation> handles,
              const std::weak_ptr<Runtime>& owner, TimePoint now);
  /// The same for sends and recvs, which have no names that could be in use.
  void submit(std::span<const Message>, std::span<Operation> handles,
              const std::weak_ptr<Runtime>& owner, TimePoint now);
  /// Call this when the operation has ended: its name may be used again. Ignores an operation
  /// that this table did not make.
  void release(OperationState&);
  /// Whether an operation in flight calls the program back.
  bool calls_back() const noexcept { return callbacks_.load(std::memory_order_relaxed) != 0; }
  /// Returns when every submit() that has begun has ended.
  void wait_for_submissions() { const MutexLock lock(mutex_); }

 private:
  using Key = std::pair<int, std::string_view>;  // the name is the request's
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept {
      return std::hash<std::string_view>()(key.second) ^
             (static_cast<std::size_t>(key.first) * 0x9E3779B97F4A7C15u);
    }
  };

  void check_running() const;
  void check_not_joined(const std::string& title) const HVD_REQUIRES(mutex_);
  void enqueue_claimed(std::span<Operation> handles) HVD_REQUIRES(mutex_);
  OperationPtr claim(const Submission&, const Operation& handle,
                     const std::weak_ptr<Runtime>& owner, TimePoint now) HVD_REQUIRES(mutex_);
  OperationPtr claim_again(const Submission&, const Operation& handle, TimePoint now)
      HVD_REQUIRES(mutex_);
  std::uint64_t& next_ordinal(const wire::Request&) HVD_REQUIRES(mutex_);
  wire::Request number(const Submission&) HVD_REQUIRES(mutex_);
  void roll_back() HVD_REQUIRES(mutex_);
  void forget(const wire::Request&) HVD_REQUIRES(mutex_);
  void forget_unused() HVD_REQUIRES(mutex_);
  void link(OperationState&) HVD_REQUIRES(mutex_);
  void unlink(OperationState&) HVD_REQUIRES(mutex_);

  SubmissionQueue& queue_;
  const int rank_;
  const std::optional<int> gpu_;
  std::atomic<int> callbacks_{0};  // in flight, with a callback

  Mutex mutex_;
  std::unordered_map<Key, OperationPtr, Hash> operations_ HVD_GUARDED_BY(mutex_);
  // The members of operations_ that may be submitted again, in the order of their last submission.
  OperationState* first_used_ HVD_GUARDED_BY(mutex_) = nullptr;
  OperationState* last_used_ HVD_GUARDED_BY(mutex_) = nullptr;
  std::vector<OperationPtr> claimed_ HVD_GUARDED_BY(mutex_);  // of the current submit()
  // By process set and kind; without a kind: of operations in sequence.
  std::map<std::pair<int, std::optional<OpKind>>, std::uint64_t> ordinals_
      HVD_GUARDED_BY(mutex_);                       // of the next unnamed operations
  std::uint64_t joins_ HVD_GUARDED_BY(mutex_) = 0;  // successful ones
  /// Names of the process sets that this rank is making with the other members. A rank makes one
  /// set of a name at a time, see Note [Sets that wait for each other] in set_disagreement.h.
  std::set<std::string> sets_being_made_ HVD_GUARDED_BY(mutex_);
  bool joined_ HVD_GUARDED_BY(mutex_) = false;  // a join() is in flight
};

}  // namespace hvd::runtime
