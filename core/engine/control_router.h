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

/// Routes control messages for one rank: reports up to the coordinator and plans down from it.
/// Holds the rank's place in the tree, merges the reports of ranks below (control::Aggregator),
/// decides on rank 0 (control::Coordinator), and handles each kind of control message.
///
///   this rank's report, messages --> [Aggregator] --> parent, or on rank 0 [Coordinator]
///   messages, or on rank 0 decide() --> plan --> this rank's engine, children
///
/// Rank 0's own report goes to the coordinator at once, and receive() returns its own plan before
/// any message of other ranks. Both count as messages, without bytes.
///
/// Not thread-safe: used by the thread that drives the engine. Errors of the transport and
/// impossible messages are thrown as hvd::Error; the engine fails with them.
class ControlRouter {
 public:
  /// References that outlive the router.
  struct Parts {
    control::ControlPlane& control;
    observe::Counters& counters;
    const StepTime& time;
    PeerWatch& watch;
    const control::Negotiator& negotiator;  ///< of this rank
  };
  /// A message of another rank, or rank 0's own plan.
  struct Received {
    std::variant<std::monostate, wire::Plan, wire::ReplayUpdate, wire::Abort, wire::PointMessage,
                 wire::WaitProbe, wire::WaitAnswer>
        payload = {};
    int source = 0;
    std::vector<std::byte> bytes = {};  ///< the data of a PointMessage, which refers to them
    /// Whether the message may bring this rank work. False for Blocked: a waiting thread must be
    /// able to go to sleep after it, otherwise this rank could not report itself as blocked.
    bool moves = true;
  };

  /// @param may_repeat whether the coordinator may start replays
  ControlRouter(const RuntimeOptions&, const Parts&, bool may_repeat);

  bool coordinates() const noexcept { return coordinator_ != nullptr; }
  /// Ranks that this one exchanges reports and plans with. The relation is symmetric.
  std::vector<int> neighbours() const;

  // --- upwards ---
  /// Sends this rank's report on its way to the coordinator.
  void report(const wire::Report&);
  /// Passes reports of ranks below on, unless they are held back. @return whether it passed any on
  bool forward_reports();
  /// Reports that this rank is blocked: its threads wait for operations that wait for other ranks.
  void report_blocked();
  /// Asks the coordinator which ranks an operation of this rank waits for.
  void ask(const wire::WaitQuestion&);
  void reply(const wire::WaitReply&);
  /// Call this when the members of the set have left its last replay. The first member informs
  /// the coordinator.
  void on_replay_left(int process_set, std::uint64_t batches_run);

  // --- downwards ---
  /// Rank 0: decides and sends the next plan. Makes no plan until receive() has returned the last
  /// one.
  /// @return whether there is a plan
  bool decide(const control::BatchesAhead&);
  /// Sends the plan to the ranks below. Call this before this rank applies it.
  void pass_down(const wire::Plan&);
  /// Call this when the negotiator has applied the plan.
  void on_applied(const wire::Plan&);

  /// Rank 0: whether send_wait_messages() may have work.
  bool has_wait_inquiries() const noexcept {
    return coordinator_ != nullptr && coordinator_->has_wait_inquiries();
  }
  /// Rank 0: sends the coordinator's messages about waits. @return those to this rank
  std::vector<wire::AnyMessage> send_wait_messages();

  // --- messages ---
  /// Whether receive() would return no message.
  bool quiet() const noexcept { return !has_own_plan() && control_.quiet(); }
  /// Whether rank 0 has decided a plan that receive() has not returned yet. No doorbell announces
  /// it.
  bool has_own_plan() const noexcept { return own_plan_.has_value(); }
  /// Drops rank 0's own plan. Call this when the job has failed and receive() is not called any
  /// more.
  void drop_own_plan() noexcept { own_plan_.reset(); }
  /// Handles the next message, if there is one. @return it, with the payload that the engine has to
  /// handle
  std::optional<Received> receive();
  /// Sends the cause of failure: rank 0 to all ranks, others to rank 0 and to some ranks of each
  /// other host, because rank 0 may hang for the same cause.
  void broadcast_failure(const wire::Abort&);
  /// Called by each rank that receives an Abort for a lost rank. Rank 1, or rank 2 if rank 1 is
  /// lost, forwards the Abort to the lost rank, which may be alive but unable to receive messages
  /// from the rank that reported it.
  void notify_suspect(const wire::Abort&);

  /// Rank 0: records that the rank has left, whether or not it has reported that.
  void on_departed(int rank) { coordinator_->record_departure(rank); }

  // --- by the clock ---
  /// Rank 0: logs stalls and their ends.
  void log_stalls();
  /// Whether other ranks depend on messages that this router holds, or it waits for messages of
  /// other ranks.
  bool waiting() const noexcept;
  /// The time at which forward_reports() or decide() may have work although no message arrives.
  std::optional<TimePoint> deadline() const;
  /// When on_applied() was last called.
  TimePoint last_plan_at() const noexcept { return last_plan_at_; }
  /// Rank 0: a line per pending operation, oldest first.
  std::vector<std::string> waiting_texts(std::size_t most) const;

 private:
  using Payload = decltype(Received::payload);
  Payload handle(int source, wire::AnyMessage);
  void on_report(int source, wire::Report);
  std::span<const std::byte> known_items() const noexcept {
    return aggregator_ ? aggregator_->known_items() : std::span<const std::byte>();
  }
  void count_local_message() noexcept;
  [[noreturn]] void refuse(int source, const std::string& what, const std::string& why) const;

  control::ControlPlane& control_;
  observe::Counters& counters_;
  const StepTime& time_;
  PeerWatch& watch_;
  const control::Negotiator& negotiator_;
  const ControlSender sender_;
  /// Has no parent if there is no tree: all ranks then report to rank 0.
  const control::TreePlace place_;
  const std::vector<int> receivers_;                   // ranks that get plans from this one
  std::unique_ptr<control::Coordinator> coordinator_;  // rank 0
  std::optional<control::Aggregator> aggregator_;      // inner ranks of a tree
  std::optional<wire::Plan> own_plan_;
  TimePoint last_plan_at_{};
};

}  // namespace hvd::runtime
