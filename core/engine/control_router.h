#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "engine/peers.h"
#include "engine/runtime_options.h"
#include "negotiation/aggregator.h"
#include "negotiation/coordinator.h"
#include "negotiation/messages.h"
#include "negotiation/negotiator.h"
#include "negotiation/tree.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// The way of reports to the coordinator and of plans from it, as one rank sees it: its place in
/// the tree, what it merges of others (control::Aggregator), what it decides if it is rank 0
/// (control::Coordinator), and what each control message means.
///
///   this rank's report, messages --> [Aggregator] --> parent, or on rank 0 [Coordinator]
///   messages, or on rank 0 decide() --> plan --> this rank's engine, children
///
/// What rank 0 has for itself is handed over as it is: its report at once, its plan by the next
/// receive(), before any message of others. Both count among its messages, not among its bytes.
///
/// Not thread-safe: the thread that drives the engine. Errors of the transport, and messages that
/// cannot be, are thrown as hvd::Error; the engine ends with them.
class ReportRoute {
 public:
  /// What it works with. All outlive it.
  struct Parts {
    control::ControlPlane& control;
    observe::Counters& counters;
    const StepTime& time;
    PeerWatch& watch;
    const control::Negotiator& negotiator;  ///< of this rank
  };
  /// A message, as far as it is not dealt with here.
  struct Received {
    std::variant<std::monostate, wire::Plan, wire::ReplayUpdate, wire::Abort> asks = {};
    int source = 0;
    /// That another rank waits is nothing to go on with; a thread that waits here must come to its
    /// rest, or it would not be known that it does.
    bool moves = true;
  };

  /// @param may_repeat the coordinator may have a schedule repeated
  ReportRoute(const RuntimeOptions&, const Parts&, bool may_repeat);

  bool coordinates() const noexcept { return coordinator_ != nullptr; }
  /// Whom reports and plans go to from here, each of whom has this rank among its own.
  std::vector<int> neighbours() const;

  // --- upwards ---
  /// What is new on this rank.
  void report(const wire::Report&);
  /// What has come from below and is not held back goes on towards the coordinator. @return whether
  /// anything was
  bool forward_reports();
  /// This rank waits, and has nothing to go on with.
  void tell_blocked();
  /// Rank 0: the schedule that the last plan with one began has been left.
  void note_left(std::uint64_t batches_run);

  // --- downwards ---
  /// Rank 0: decides, and publishes, the next plan; none before receive() has given the last one.
  /// @return whether there was one
  bool decide(const control::BatchesAhead&);
  /// Before this rank applies the plan: ranks below report after it, in terms that this one must
  /// know by then.
  void pass_down(const wire::Plan&);
  /// After its negotiator has applied it.
  void note_applied(const wire::Plan&);

  // --- messages ---
  /// receive() would find nothing.
  bool quiet() const noexcept { return !has_own_plan() && control_.quiet(); }
  /// Rank 0 has decided a plan that it has not received. No doorbell announces it.
  bool has_own_plan() const noexcept { return own_plan_.has_value(); }
  /// The job has failed: receive() is not called any more.
  void drop_own_plan() noexcept { own_plan_.reset(); }
  /// Takes in the next message, if there is one.
  std::optional<Received> receive();
  /// Tells of the first cause: rank 0 all ranks, others rank 0 and some ranks besides, as rank 0
  /// may hang on the same cause.
  void tell_failure(const wire::Abort&);
  /// Called by each rank that hears of a loss; one of them, which is not rank 0, tells the rank
  /// that is said to be lost: should it live, whoever told the others is whom it cannot hear.
  void tell_the_lost(const wire::Abort&);

  /// Rank 0: that rank is gone, and has said so or not.
  void note_departed(int rank) { coordinator_->record_departure(rank); }

  // --- by the clock ---
  /// Rank 0: who is waited for for long, into the log.
  void tell_of_stalls();
  /// Others depend on this rank, or it does on them, for what passes here.
  bool waiting() const noexcept;
  /// When forward_reports() or decide() may have something to do though nothing comes.
  std::optional<TimePoint> deadline() const;
  /// When note_applied() was last called.
  TimePoint last_plan_at() const noexcept { return last_plan_at_; }
  /// Rank 0: what is waited for, oldest first.
  std::vector<std::string> waiting_texts(std::size_t most) const;

 private:
  using Asks = decltype(Received::asks);
  Asks handle(int source, wire::AnyMessage);
  void take_in(int source, const wire::Report&);
  void count_own_message() noexcept;
  [[noreturn]] void refuse(int source, const std::string& what, const std::string& why) const;

  control::ControlPlane& control_;
  observe::Counters& counters_;
  const StepTime& time_;
  PeerWatch& watch_;
  const control::Negotiator& negotiator_;
  const ControlSender sender_;
  /// Without a tree, in which rank 0 hears everybody, a place without a parent.
  const control::TreePlace place_;
  const std::vector<int> receivers_;                   // others that get a plan from here
  std::unique_ptr<control::Coordinator> coordinator_;  // rank 0
  std::optional<control::Aggregator> aggregator_;      // inner ranks of a tree
  std::optional<wire::Plan> own_plan_;
  TimePoint last_plan_at_{};
};

}  // namespace hvd::runtime
