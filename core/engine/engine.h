#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "engine/operations.h"
#include "engine/executor.h"
#include "engine/peers.h"
#include "engine/progress_policy.h"
#include "engine/control_router.h"
#include "engine/runtime_options.h"
#include "engine/steady_state.h"
#include "negotiation/negotiator.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// The right to drive one engine, as the compiler knows it. Which thread has it is for the Runtime
/// to say (docs/threading.md): nothing of this is left in the program.
class HVD_CAPABILITY("progress ownership") ProgressOwnership {
 public:
  void acquired() const noexcept HVD_ACQUIRE() {}
  void released() const noexcept HVD_RELEASE() {}
};

/// What an engine works with. What it refers to outlives the engine.
struct EngineParts {
  std::unique_ptr<control::ControlPlane> control;
  std::vector<std::shared_ptr<Backend>> backends;
  const Clock& clock;
  observe::Counters& counters;
  TimelineSlot& timeline;
  std::shared_ptr<SharedArena> arena = nullptr;       ///< of this rank
  std::shared_ptr<device::Context> device = nullptr;  ///< of this rank, if it has a GPU
};

/// The state machine of one rank: submissions to reports, reports to plans (on rank 0), plans to
/// executed batches.
///
/// step() and whatever else requires progress() belong to the thread that owns progress (see
/// Runtime);
/// front(), operations(), doorbell() and topology() may be used by any thread.
/// Nothing blocks, and no error escapes: the first one is the cause of failure with which
/// everything outstanding and later ends.
///
///   running --all ranks asked for shutdown, nothing in flight--> shut down
///      \------ loss, broken message, backend error, fail() ----> failed
class Engine {
 public:
  Engine(const RuntimeOptions&, EngineParts);
  ~Engine();

  // --- any thread ---
  EngineFront& front() noexcept { return front_; }
  const EngineFront& front() const noexcept { return front_; }
  OperationTable& operations() noexcept { return operations_; }
  const OperationTable& operations() const noexcept { return operations_; }
  Doorbell& doorbell() noexcept { return control_->doorbell(); }
  const Topology& topology() const noexcept { return control_->topology(); }
  const ProgressOwnership& progress() const noexcept HVD_RETURN_CAPABILITY(progress_) {
    return progress_;
  }

  // --- progress owner ---
  using Callbacks = EngineFront::Callbacks;
  /// Makes all the progress possible now; true when there was any. kNone: accepts no submissions
  /// while one of them has a callback, so that no callback runs unless its operation was in flight
  /// before.
  bool step(Callbacks = Callbacks::kAll) noexcept HVD_REQUIRES(progress_);
  enum class Waiting : std::uint8_t { kWithoutLimit, kForSomeTime };
  /// A thread waits for an operation and is about to sleep. True when step() has work because of
  /// it. One that waits for some time only goes on by itself, so it is no part of a deadlock; nor
  /// is a BackgroundThread.
  bool note_blocked(Waiting) noexcept HVD_REQUIRES(progress_);
  /// Something is in flight, visible only by polling.
  bool needs_polling() const noexcept HVD_REQUIRES(progress_);
  /// Data or control messages are being moved right now.
  bool transferring() const noexcept HVD_REQUIRES(progress_) {
    return executor_.needs_polling() || control_->busy() || route_.has_own_plan();
  }
  /// The most urgent reason to poll.
  PollFor polls_for() const noexcept HVD_REQUIRES(progress_) {
    if (steady_.launch_awaits_other_hosts()) return PollFor::kReplayedLaunch;
    return transferring() ? PollFor::kTransfer : PollFor::kMessages;
  }
  /// This rank waits for something or works on something.
  bool busy() const noexcept HVD_REQUIRES(progress_) {
    return waits_for_others() || executor_.active() || !executor_.device_completions().empty() ||
           (front_.shutdown_requested() && !front_.shut_down());
  }
  /// Time until the next deadline.
  Duration time_to_deadline() const noexcept HVD_REQUIRES(progress_);
  /// Ends what is left, after shut_down() or failed().
  void end_outstanding(const Status&) noexcept HVD_REQUIRES(progress_);
  /// Ends everything; what the transport or a peer may still use is kept until the process ends.
  void give_up(const Status&) noexcept HVD_REQUIRES(progress_);
  /// What this rank is doing, a line per outstanding operation; on rank 0 also who is waited for.
  std::string state_text() const HVD_REQUIRES(progress_);
  /// Announces an orderly exit, so that the silence that follows is not taken for a loss.
  void farewell() noexcept HVD_REQUIRES(progress_) { control_->farewell(); }

 private:
  bool take_submissions(Callbacks) HVD_REQUIRES(progress_);
  void begin(const OperationPtr&) HVD_REQUIRES(progress_);
  /// @return whether the operation now waits for a plan; otherwise it has ended
  bool negotiate(const OperationPtr&) HVD_REQUIRES(progress_);
  /// Runs what repeats, and applies the plans that had to wait until it was left.
  bool run_steady() HVD_REQUIRES(progress_);
  void leave_steady() HVD_REQUIRES(progress_);
  void begin_steady(std::vector<control::AgreedBundle> schedule) HVD_REQUIRES(progress_);
  bool waits_for_others() const noexcept HVD_REQUIRES(progress_) {
    return steady_.anything_waits() || !outstanding_.empty();
  }
  using OperationsInOrder = std::map<std::uint64_t, OperationPtr>;  // by OperationState::order
  /// The operations that wait for other ranks, also in a replayed schedule.
  OperationsInOrder all_outstanding() const HVD_REQUIRES(progress_);
  /// The operation no longer waits for a plan. @pre it does
  OperationPtr release_outstanding(std::uint64_t order) HVD_REQUIRES(progress_);
  bool send_report() HVD_REQUIRES(progress_);
  bool receive() HVD_REQUIRES(progress_);
  /// A plan has come: applies it, or lets it wait.
  void take_in(const wire::Plan&) HVD_REQUIRES(progress_);
  void take_in(const wire::Abort&) HVD_REQUIRES(progress_);
  /// @pre nothing is repeated
  void apply(const wire::Plan&) HVD_REQUIRES(progress_);
  void start(control::AgreedBatch) HVD_REQUIRES(progress_);
  bool decide() HVD_REQUIRES(progress_);
  bool do_housekeeping() HVD_REQUIRES(progress_);
  bool waiting() const noexcept HVD_REQUIRES(progress_) { return busy() || route_.waiting(); }
  Status explained(const Status& cause) HVD_REQUIRES(progress_);
  enum class BrokenConnections : std::uint8_t { kIgnored, kNameTheLost };
  std::optional<Status> hear_of_loss(BrokenConnections) HVD_REQUIRES(progress_);
  void fail(const Status&, bool tell_others) noexcept HVD_REQUIRES(progress_);
  void note_departed(int rank) HVD_REQUIRES(progress_);
  [[noreturn]] void lose(const control::PeerLoss&) HVD_REQUIRES(progress_);
  void finish(const OperationPtr&, const Status&, const EventPtr&, bool in_flight)
      HVD_REQUIRES(progress_);
  void end_with(const OperationPtr&, const wire::ErrorEntry&) HVD_REQUIRES(progress_);
  void dump_state_if_asked() HVD_REQUIRES(progress_);

  observe::Counters& counters_;
  std::unique_ptr<control::ControlPlane> control_;
  EngineFront front_;
  OperationTable operations_;

  ProgressOwnership progress_;
  StepTime time_ HVD_GUARDED_BY(progress_);
  control::Negotiator negotiator_ HVD_GUARDED_BY(progress_);
  Executor executor_ HVD_GUARDED_BY(progress_);
  SteadyState steady_ HVD_GUARDED_BY(progress_);
  PeerWatch watch_ HVD_GUARDED_BY(progress_);
  ReportRoute route_ HVD_GUARDED_BY(progress_);
  BlockedNotice blocked_ HVD_GUARDED_BY(progress_);
  // Those that wait for a plan, not for a replayed schedule.
  OperationsInOrder outstanding_ HVD_GUARDED_BY(progress_);
  std::vector<OperationPtr> taken_ HVD_GUARDED_BY(progress_);  // from front_, empty between steps
  std::uint64_t begun_ HVD_GUARDED_BY(progress_) = 0;
  bool shutdown_agreed_ HVD_GUARDED_BY(progress_) = false;
  // Since the failure: it cannot even send what is left.
  bool control_broken_ HVD_GUARDED_BY(progress_) = false;
};

}  // namespace hvd::runtime
