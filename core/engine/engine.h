#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "control/control_plane.h"
#include "control/negotiator.h"
#include "engine/engine_front.h"
#include "engine/outstanding.h"
#include "engine/peer_watch.h"
#include "engine/report_route.h"
#include "engine/runtime_options.h"
#include "engine/steady_state.h"
#include "engine/step_time.h"
#include "execution/executor.h"
#include "execution/operation_state.h"

namespace hvd::runtime {

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
/// step() and what is marked "progress owner" belong to the thread that owns progress (see
/// Runtime);
/// front(), doorbell() and topology() may be used by any thread.
/// Nothing blocks, and no error escapes: the first one is the cause of failure with which
/// everything outstanding and later ends.
///
///   running --all ranks asked for shutdown, nothing in flight--> shut down
///      \------ loss, broken message, backend error, fail() ----> failed
class Engine {
 public:
  /// The operation has ended (its state is set right after): the name may be used again.
  using OnEnd = std::function<void(const OperationState&)>;

  Engine(const RuntimeOptions&, EngineParts, OnEnd);
  ~Engine();

  // --- any thread ---
  EngineFront& front() noexcept { return front_; }
  const EngineFront& front() const noexcept { return front_; }
  Doorbell& doorbell() noexcept { return control_->doorbell(); }
  const Topology& topology() const noexcept { return control_->topology(); }

  // --- progress owner ---
  using Callbacks = EngineFront::Callbacks;
  /// Makes all the progress possible now; true when there was any. kNone: accepts no submissions
  /// while one of them has a callback, so that no callback runs unless its operation was in flight
  /// before.
  bool step(Callbacks = Callbacks::kAll) noexcept;
  /// A thread waits for an operation and is about to sleep. True when step() has work because of
  /// it.
  bool note_blocked() noexcept;
  /// Something is in flight, visible only by polling.
  bool needs_polling() const noexcept;
  /// Data or control messages are being moved right now.
  bool transferring() const noexcept {
    return executor_.needs_polling() || control_->busy() || route_.has_own_plan();
  }
  /// This rank waits for something or works on something.
  bool busy() const noexcept {
    return waits_for_others() || executor_.active() || !executor_.device_completions().empty() ||
           (front_.shutdown_requested() && !front_.shut_down());
  }
  /// Time until the next deadline.
  Duration time_to_deadline() const noexcept;
  /// Ends what is left, after shut_down() or failed().
  void end_outstanding(const Status&) noexcept;
  /// Ends everything; what the transport or a peer may still use is kept until the process ends.
  void give_up(const Status&) noexcept;
  /// What this rank is doing, a line per outstanding operation; on rank 0 also who is waited for.
  std::string state_text() const;
  /// Announces an orderly exit, so that the silence that follows is not taken for a loss.
  void farewell() noexcept { control_->farewell(); }

 private:
  bool take_submissions(Callbacks);
  void begin(const OperationPtr&);
  /// Runs what repeats, and applies the plans that had to wait until it was left.
  bool run_steady();
  void leave_steady();
  void begin_steady(std::vector<control::AgreedBatch> schedule);
  bool waits_for_others() const noexcept {
    return steady_.anything_waits() || !outstanding_.empty();
  }
  std::vector<OperationPtr> outstanding_in_order() const;
  bool send_report();
  bool receive();
  /// A plan has come: applies it, or lets it wait.
  void take_in(const wire::Plan&);
  void take_in(const wire::Abort&);
  /// @pre nothing is repeated
  void apply(const wire::Plan&);
  void start(control::AgreedBatch);
  bool decide();
  bool do_housekeeping();
  bool waiting() const noexcept { return busy() || route_.waiting(); }
  Status explained(const Status& cause);
  void fail(const Status&, bool tell_others) noexcept;
  [[noreturn]] void lose(const control::PeerLoss&);
  void finish(const OperationPtr&, const Status&, const EventPtr&, bool in_flight);
  void end_with(const OperationPtr&, const wire::ErrorEntry&);
  void dump_state_if_asked();

  observe::Counters& counters_;
  const OnEnd on_end_;
  std::unique_ptr<control::ControlPlane> control_;
  EngineFront front_;

  // Progress owner only.
  StepTime time_;
  control::Negotiator negotiator_;
  Executor executor_;
  SteadyState steady_;
  PeerWatch watch_;
  ReportRoute route_;
  BlockedNotice blocked_;
  Outstanding outstanding_;          // not those that wait in the schedule that is repeated
  std::vector<OperationPtr> taken_;  // from front_, empty between steps
  std::uint64_t begun_ = 0;
  bool shutdown_agreed_ = false;
  bool control_broken_ = false;  // since the failure: it cannot even send what is left
};

}  // namespace hvd::runtime
