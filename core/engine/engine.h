#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "engine/control_router.h"
#include "engine/executor.h"
#include "engine/operations.h"
#include "engine/peers.h"
#include "engine/point_to_point.h"
#include "engine/progress_policy.h"
#include "engine/quick_messages.h"
#include "engine/runtime_options.h"
#include "engine/steady_sets.h"
#include "engine/wait_description.h"
#include "negotiation/negotiator.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// The right to drive one engine, as a capability of Clang's thread-safety analysis. The Runtime
/// decides which thread has it (docs/threading.md). It generates no code.
class HVD_CAPABILITY("progress ownership") ProgressOwnership {
 public:
  void acquired() const noexcept HVD_ACQUIRE() {}
  void released() const noexcept HVD_RELEASE() {}
};

/// The parts of an engine. The references must outlive it.
struct EngineParts {
  std::unique_ptr<control::ControlPlane> control;
  std::vector<std::shared_ptr<Backend>> backends;
  const Clock& clock;
  observe::Counters& counters;
  CurrentTimeline& timeline;
  std::shared_ptr<SharedArena> arena = nullptr;       ///< of this rank
  std::shared_ptr<device::Context> device = nullptr;  ///< of this rank, if it has a GPU
};

/// The state machine of one rank: submissions become reports, reports become plans (on rank 0), and
/// plans become executed batches.
///
/// The thread that owns progress calls step() and the other functions that require progress() (see
/// Runtime). Any thread may use submission_queue(), operations(), doorbell() and topology(). Does
/// not block or throw. The first error becomes the cause of failure, and all outstanding and later
/// operations end with it.
///
///   running --all ranks requested shutdown, nothing in flight--> shut down
///      \------ loss, broken message, backend error, fail() ----> failed
class Engine {
 public:
  Engine(const RuntimeOptions&, EngineParts);
  ~Engine();

  // --- any thread ---
  SubmissionQueue& submission_queue() noexcept { return submission_queue_; }
  const SubmissionQueue& submission_queue() const noexcept { return submission_queue_; }
  OperationTable& operations() noexcept { return operations_; }
  const OperationTable& operations() const noexcept { return operations_; }
  Doorbell& doorbell() noexcept { return control_->doorbell(); }
  const Topology& topology() const noexcept { return control_->topology(); }
  const ProgressOwnership& progress() const noexcept HVD_RETURN_CAPABILITY(progress_) {
    return progress_;
  }

  // --- progress owner ---
  using Callbacks = SubmissionQueue::Callbacks;
  enum class Extent : std::uint8_t {
    kEverything,
    /// Advances only the replays and the batches. Most steps use it while schedules are replayed on
    /// one host, so that a spinning thread detects a flag sooner. The thread calls stop_polling()
    /// before it sleeps or leaves.
    kReplays
  };
  /// Makes all the progress that is possible now. @return whether it made any. kNone: accepts no
  /// submissions while one of them has a callback, so that only callbacks of operations in flight
  /// run.
  bool step(Callbacks = Callbacks::kAll, Extent = Extent::kEverything) noexcept
      HVD_REQUIRES(progress_);
  /// Passes a message if the thread of the other rank waits for it at the same time: see
  /// QuickMessages. Takes some microseconds at most, except while the other rank reads the message.
  /// @param wanted whether another thread waits to drive
  /// @return the other rank; empty: the message has not been passed
  std::optional<int> pass_quickly(const Message&, const std::function<bool()>& wanted) noexcept
      HVD_REQUIRES(progress_);
  enum class Waiting : std::uint8_t {
    kWithoutLimit,
    kForSomeTime,
    kForMessage  ///< a thread waits for a send or recv, so the ranks may make progress without
                 ///< plans
  };
  /// Call this before a thread that has called step() with Extent::kReplays sleeps or stops calling
  /// it. @return whether the other ranks may have relied on these calls, in which case step() has
  /// to be called once more
  bool stop_polling() noexcept HVD_REQUIRES(progress_) { return steady_.stop_polling(); }
  /// Call this before a thread that waits for an operation goes to sleep. @return whether step()
  /// now has work, in which case the thread must not sleep. A wait with a time limit ends by
  /// itself, so it does not count as evidence of a deadlock; neither does the wait of a
  /// BackgroundThread.
  bool prepare_to_block(Waiting) noexcept HVD_REQUIRES(progress_);
  /// Whether work is in flight whose end does not ring the doorbell.
  bool needs_polling() const noexcept HVD_REQUIRES(progress_);
  /// Whether data or control messages are being moved.
  bool transferring() const noexcept HVD_REQUIRES(progress_) {
    return executor_.needs_polling() || control_->busy() || router_.has_own_plan();
  }
  /// The most urgent reason to poll.
  PollFor polls_for() const noexcept HVD_REQUIRES(progress_) {
    if (steady_.launch_awaits_other_hosts()) return PollFor::kReplayedLaunch;
    return transferring() ? PollFor::kTransfer : PollFor::kMessages;
  }
  /// Whether this rank waits for other ranks or has work in progress.
  bool busy() const noexcept HVD_REQUIRES(progress_) {
    return waits_for_others() || points_.active() || quick_.waits_for_reader() ||
           executor_.active() || !executor_.device_completions().empty() ||
           (submission_queue_.shutdown_requested() && !submission_queue_.shut_down());
  }
  /// Time until the next deadline.
  Duration time_to_deadline() const noexcept HVD_REQUIRES(progress_);
  /// Ends the operations that are left, after shut_down() or failed().
  void end_outstanding(const Status&) noexcept HVD_REQUIRES(progress_);
  /// Ends all operations. Memory that the transport or a peer may still use is kept until the
  /// process ends.
  void give_up(const Status&) noexcept HVD_REQUIRES(progress_);
  /// A text for the log: one line per outstanding operation, on rank 0 with the ranks that it waits
  /// for.
  std::string state_text() const HVD_REQUIRES(progress_);
  /// Announces an orderly exit, so that the other ranks do not treat the silence that follows as a
  /// loss.
  void farewell() noexcept HVD_REQUIRES(progress_) { control_->farewell(); }

 private:
  bool begin_submissions(Callbacks) HVD_REQUIRES(progress_);
  /// Hands the operation to the part of the engine in which it waits.
  void begin(OperationPtr&&) HVD_REQUIRES(progress_);
  /// @return whether the operation now waits for a plan; otherwise it has ended
  bool negotiate(const OperationPtr&) HVD_REQUIRES(progress_);
  /// Advances the replayed schedules, and applies the deferred plans once this rank has left the
  /// replay of all ranks.
  bool run_steady(bool polls = false) HVD_REQUIRES(progress_);
  void leave_steady(int process_set) HVD_REQUIRES(progress_);
  void begin_steady(int process_set, std::vector<control::AgreedBundle> schedule)
      HVD_REQUIRES(progress_);
  bool waits_for_others() const noexcept HVD_REQUIRES(progress_) {
    return steady_.anything_waits() || !outstanding_.empty();
  }
  using OperationsInOrder = std::map<std::uint64_t, OperationPtr>;  // by OperationState::order
  /// The operations that wait for other ranks, also in a replayed schedule.
  OperationsInOrder all_outstanding() const HVD_REQUIRES(progress_);
  /// Removes and returns an operation that waits for a plan. @pre it waits for one
  OperationPtr release_outstanding(std::uint64_t order) HVD_REQUIRES(progress_);
  bool send_report() HVD_REQUIRES(progress_);
  bool receive() HVD_REQUIRES(progress_);
  bool advance_messages() HVD_REQUIRES(progress_);
  /// Describes the work of this rank besides sends and recvs. Empty without any.
  std::string activity() const HVD_REQUIRES(progress_);
  /// Applies the plan, or defers it while this rank still replays a schedule.
  void on_plan(const wire::Plan&) HVD_REQUIRES(progress_);
  void on_abort(const wire::Abort&) HVD_REQUIRES(progress_);
  /// @pre no schedule of all ranks is replayed in a job of several hosts
  void apply(const wire::Plan&) HVD_REQUIRES(progress_);
  void start(control::AgreedBatch) HVD_REQUIRES(progress_);
  bool decide() HVD_REQUIRES(progress_);
  bool do_housekeeping() HVD_REQUIRES(progress_);
  /// Replies to probes of the coordinator, and writes the descriptions of waits that threads have
  /// requested (engine_waits.cpp).
  bool describe_waits() HVD_REQUIRES(progress_);
  struct RequestedDescription;
  bool answer_probes() HVD_REQUIRES(progress_);
  /// @return whether the description has been written
  bool describe(RequestedDescription&) HVD_REQUIRES(progress_);
  std::string describe_unfinished(RequestedDescription&) HVD_REQUIRES(progress_);
  std::string describe_message(RequestedDescription&) HVD_REQUIRES(progress_);
  void on_message_answer(std::uint64_t inquiry, int source, const std::string& activity)
      HVD_REQUIRES(progress_);
  void on_wait_answer(const wire::WaitAnswer&) HVD_REQUIRES(progress_);
  bool waits_for_others(const OperationState&) const HVD_REQUIRES(progress_);
  bool has_submitted(const wire::WaitProbe&) const HVD_REQUIRES(progress_);
  /// This rank's position in the sequence of operations of this process set.
  wire::SequencePosition sequence_position(int process_set) const HVD_REQUIRES(progress_);
  /// Continues "rank 0 ...": the last operation, and the operations that this rank waits for.
  std::string own_activity() const HVD_REQUIRES(progress_);
  bool waiting() const noexcept HVD_REQUIRES(progress_) { return busy() || router_.waiting(); }
  Status explain(const Status& cause) HVD_REQUIRES(progress_);
  enum class BrokenConnections : std::uint8_t { kIgnored, kNameLostRank };
  std::optional<Status> find_reported_loss(BrokenConnections) HVD_REQUIRES(progress_);
  void fail(const Status&, bool notify_others) noexcept HVD_REQUIRES(progress_);
  void on_departed(int rank) HVD_REQUIRES(progress_);
  [[noreturn]] void throw_loss(const control::PeerLoss&) HVD_REQUIRES(progress_);
  void finish(const OperationPtr&, const Status&, const EventPtr&, bool in_flight)
      HVD_REQUIRES(progress_);
  void end_with(const OperationPtr&, const wire::ErrorEntry&) HVD_REQUIRES(progress_);
  void dump_state_if_requested() HVD_REQUIRES(progress_);

  const std::function<void(const Status&)> on_failure_;  // RuntimeOptions::on_failure
  observe::Counters& counters_;
  std::unique_ptr<control::ControlPlane> control_;
  SubmissionQueue submission_queue_;
  OperationTable operations_;

  ProgressOwnership progress_;
  StepTime time_ HVD_GUARDED_BY(progress_);
  control::Negotiator negotiator_ HVD_GUARDED_BY(progress_);
  Executor executor_ HVD_GUARDED_BY(progress_);
  SteadySets steady_ HVD_GUARDED_BY(progress_);
  PeerWatch watch_ HVD_GUARDED_BY(progress_);
  ControlRouter router_ HVD_GUARDED_BY(progress_);
  BlockedNotice blocked_ HVD_GUARDED_BY(progress_);
  PointToPoint points_ HVD_GUARDED_BY(progress_);
  QuickMessages quick_ HVD_GUARDED_BY(progress_);
  int quick_calls_ HVD_GUARDED_BY(progress_) = 0;  // since the last step for them
  // The last operation, if it was a quick message, which has no OperationState.
  std::optional<MessageSide> last_quick_ HVD_GUARDED_BY(progress_);
  // Operations that wait for a plan. Excludes those that wait for a replay, and sends and recvs.
  OperationsInOrder outstanding_ HVD_GUARDED_BY(progress_);
  // Just popped from submission_queue_; empty between steps.
  std::vector<OperationPtr> popped_ HVD_GUARDED_BY(progress_);
  std::uint64_t begun_ HVD_GUARDED_BY(progress_) = 0;
  OperationPtr last_begun_ HVD_GUARDED_BY(progress_);
  TimePoint last_begun_at_ HVD_GUARDED_BY(progress_){};
  /// A description that a thread waits for, while other ranks are asked.
  struct RequestedDescription {
    std::shared_ptr<WaitDescription> description = {};
    std::uint64_t inquiry = 0;  ///< its number as a question, or as an inquiry of points_
    bool asked = false;
    TimePoint asked_at{};
    std::optional<wire::WaitAnswer> answer = {};  ///< of the coordinator
    RankSet unanswered = {};                      ///< possible other sides of a send or recv
    std::vector<std::string> answers = {};        ///< of the other ones
  };
  std::vector<RequestedDescription> descriptions_ HVD_GUARDED_BY(progress_);
  std::vector<wire::WaitProbe> probes_ HVD_GUARDED_BY(progress_);  // without a reply yet
  std::uint64_t last_question_ HVD_GUARDED_BY(progress_) = 0;
  int short_steps_ HVD_GUARDED_BY(progress_) = 0;  // since the last one of Extent::kEverything
  bool shutdown_agreed_ HVD_GUARDED_BY(progress_) = false;
  // Set after a failure: the remaining messages cannot be sent.
  bool control_broken_ HVD_GUARDED_BY(progress_) = false;
};

}  // namespace hvd::runtime
