#pragma once

// core/negotiation: how the ranks agree on the operations that they run, and in which order. Begin
// with this file and docs/protocol.md.
//
//   messages.h, codec.h                  the messages and their bytes
//   negotiator.h                         every rank: submissions in, reports out; plans in
//   coordinator.h                        rank 0: reports in, plans out
//     ready_table.h                        pending operations and the ranks that submitted them
//     validator.h                          whether the requests of the ranks agree
//     fusion_planner.h                     which operations share a batch
//     set_disagreement.h                   process sets whose members disagree
//     stall_inspector.h, rank_records.h    operations that lack ranks, and the state of each rank
//     wait_inquiries.h                     which ranks an operation waits for, on request
//   response_cache.h, process_set_table.h  state that is equal on all ranks
//   tree.h, aggregator.h, equal_reports.h  merging reports on their way to rank 0
//   replays.h                            which steps repeat
//   schedule_replay.h, dissemination_barrier.h  repeating steps without plans
//   liveness.h                           pings to other hosts
//
// All classes are pure: no transport, thread, clock or environment.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/expect.h"
#include "base/rank_set.h"
#include "negotiation/messages.h"
#include "negotiation/process_set_table.h"
#include "negotiation/rank_records.h"
#include "negotiation/ready_table.h"
#include "negotiation/replays.h"
#include "negotiation/response_cache.h"
#include "negotiation/stall_inspector.h"
#include "negotiation/wait_inquiries.h"

namespace hvd::control {

/// A batch that is not full is held back while this many batches are ahead of it.
inline constexpr std::size_t kBusyBatches = 2;

/// How many batches rank 0 has in flight on the channel where a tensor of this process set and on
/// this device would run; 0 for sets without rank 0, because rank 0 has no channel of these sets.
/// An empty function stands for 0.
using BatchesAhead = std::function<std::size_t(int process_set, DeviceType)>;

struct CoordinatorOptions {
  std::int64_t fusion_threshold = 64 << 20;
  std::size_t cache_capacity = 1024;
  bool schedule_lock = false;
  /// Whether process sets are replayed too, independently of each other. Only if all ranks share
  /// one host.
  bool replays_sets = false;
  StallLimits stall = {};
  std::vector<std::string> host_of_rank = {"localhost"};  ///< its size is the number of ranks
};

// Note [The shortcut for repeated plans]
// In the steady state one report holds the same hits of all ranks. If no other operation is
// pending, the plan depends only on these slots, the contents of the cache and the fusion
// threshold. So the coordinator keeps the plan and answers such a report with it, without the ready
// table. If another report arrives first, or the plan should be held back, the hits go into the
// table as if there were no shortcut.

/// The plan for slots that all ranks hit at once, kept until the cache changes. Pure; not
/// thread-safe.
///
///   offer() --known--> waiting --repeat() or release()-->
///   offer() --unknown--> learning --learn()-->
class RepeatedPlan {
 public:
  /// Called when all ranks have hit these slots, and no other operation is pending.
  /// @return whether the plan for them is known, in which case they wait for repeat() or release().
  /// If not, learn() keeps the next plan.
  bool offer(const wire::StampedHits&);
  bool waiting() const noexcept { return waiting_.has_value(); }
  /// The slots that wait. @pre waiting()
  const wire::SlotSet& slots() const noexcept {
    HVD_EXPECT(waiting(), "hits wait");
    return waiting_->slots;
  }
  /// The plan for them, without its number. @pre waiting()
  const wire::Plan& plan() const noexcept {
    HVD_EXPECT(waiting(), "hits wait");
    return known_->plan;
  }
  /// Called when another report arrives first. @return the hits that have waited, for the ready
  /// table
  std::optional<wire::StampedHits> release();
  /// Returns the plan for the waiting hits, and applies it to the cache. @pre waiting()
  wire::Plan repeat(std::uint64_t sequence, ResponseCache&);
  /// Like wire::encode(), but cheaper for the plan that repeat() returned last.
  wire::Bytes encode(const wire::Plan&) const;

  bool learning() const noexcept { return learning_.has_value(); }
  /// Keeps the plan that was decided after offer() if it runs exactly the offered slots.
  /// @param nothing_pending whether no operation is pending after the plan
  void learn(wire::Plan, bool nothing_pending);
  /// Called when another plan has changed the order of the cache.
  void mark_cache_touched() noexcept {
    if (known_) known_->just_used = false;
  }
  /// Called when a slot of the cache gets another response.
  void forget() noexcept { known_.reset(); }

 private:
  struct Known {
    wire::SlotSet slots = {};
    wire::Bytes encoded = {};  ///< with the sequence 0
    wire::Plan plan = {};
    bool just_used = false;         ///< the cache is ordered as after this plan
    std::uint64_t repeated_as = 0;  ///< the number that repeat() gave it last
  };
  std::optional<Known> known_;
  std::optional<wire::StampedHits> waiting_;
  std::optional<wire::SlotSet> learning_;
};

/// Decides, on rank 0, which operations all ranks run next and in which order. Pure: reports and
/// the time go in, plans come out. Not thread-safe.
///
/// The plans for a set of ready tensors do not depend on the order in which reports arrive. See
/// Note [Meaning of a slot] in response_cache.h.
class Coordinator {
 public:
  Coordinator(CoordinatorOptions, ProcessSetTable);

  /// Adds a report. Its cost depends on the operations and on the ranges of ranks in the report,
  /// not on the number of ranks.
  /// @throws hvd::Error when no correct peer can have sent the report
  void accept(const wire::Report&, TimePoint now);

  /// Records that the rank waits for other ranks and has submitted no operation for a while.
  /// @param last_applied the last plan that it had applied then
  void record_blocked(int rank, std::uint64_t last_applied);

  /// Accepts a rank's question which ranks an operation waits for. wait_messages() then returns the
  /// messages.
  /// @throws hvd::Error when the rank takes no part in the operation
  void ask(int rank, const wire::WaitQuestion&, TimePoint now);
  void accept(int source, const wire::WaitReply& reply) { waits_.accept(source, reply); }
  /// Removes and returns the messages about waits that are due.
  std::vector<WaitInquiries::Outgoing> wait_messages(TimePoint now);
  bool has_wait_inquiries() const noexcept { return !waits_.empty(); }

  /// The next plan, if any. While kBusyBatches or more batches are ahead of them, tensors that may
  /// share a batch are held back until one of these batches completes or the tensors of their sort
  /// fill a batch. This gives fusion without a timer. Other tensors are never held back.
  std::optional<wire::Plan> decide(TimePoint now, const BatchesAhead&);

  /// The bytes of the last plan. Cheaper than wire::encode() for a repeated plan.
  wire::Bytes encode(const wire::Plan& plan) const { return repeated_.encode(plan); }

  /// Called when the members of the set have left its last replay.
  void end_replay(int process_set, std::uint64_t batches_run) {
    replays_.end(process_set, batches_run);
  }

  /// Warnings about stalled operations for the log, each returned once.
  std::vector<std::string> stall_warnings(TimePoint now) { return stalls_.warnings(table_, now); }
  /// Texts about operations that run after a warning about them, each returned once.
  std::vector<std::string> resumptions() { return stalls_.release_resumptions(); }
  /// Texts about pending operations, oldest first, with the missing ranks and their last
  /// operations.
  std::vector<std::string> waiting_texts(TimePoint now, std::size_t most) const {
    return stalls_.waiting_texts(table_, now, most);
  }
  /// The time at which decide(), stall_warnings() or wait_messages() may return something even if
  /// no message arrives.
  std::optional<TimePoint> next_deadline() const;
  /// Whether an operation is pending.
  bool waiting() const noexcept { return !table_.pending().empty() || repeated_.waiting(); }
  /// Records that the rank has left, with or without a report.
  void record_departure(int rank) { departures_.add(RankSet(rank)); }
  bool all_shut_down() const noexcept { return departures_.all(); }
  /// How many displaced cache entries and failed uses are remembered only because a rank may still
  /// refer to them.
  std::size_t displaced_entries() const noexcept { return cache_.displaced(); }
  std::size_t failed_uses() const noexcept { return failed_uses_.size(); }
  const ResponseCache& cache() const noexcept { return cache_; }

 private:
  /// Ranks with equal reports, and the plan that their slots refer to.
  struct Source {
    RankSpan ranks = {};
    std::uint64_t as_of = 0;
    TimePoint now{};
  };

  void check(const wire::Report&) const;
  bool accept_by_shortcut(const wire::Report&);
  void flush_shortcut(TimePoint now);
  std::optional<wire::Plan> repeat_plan(TimePoint now, const BatchesAhead&);
  ReadyTable::KeepGathering keep_gathering_while(const BatchesAhead&) const;
  bool may_hold_back_repeated(const BatchesAhead&) const;
  void accept_hit(const Source&, std::uint32_t slot, std::uint64_t ordinal, wire::Stamp);
  void accept_request(const Source&, Submitters, wire::Request);
  void accept_group(const wire::Report::Group&, const Source&, bool joins);
  const wire::Response& slot_as_seen(const Source&, std::uint32_t slot) const;
  void record_activity(const wire::Report::Section&, TimePoint now);
  void record_applied(RankSpan ranks, std::uint64_t sequence);

  /// @param informed ranks that receive the status through other operations, so their next
  /// submission of this operation does not belong to the failed use
  void fail(PendingRef, const Status&, wire::Plan&, RankSpan informed = {});
  void fail_disagreeing_sets(wire::Plan&);
  void fail_stalled(TimePoint now, wire::Plan&);
  void fail_deadlocked(TimePoint now, wire::Plan&);
  void fail_for_shutdown(wire::Plan&);
  void fail_operations_without_joined_ranks(wire::Plan&);
  std::optional<Status> why_never_complete(const PendingTensor&) const;
  void plan_ready(TimePoint now, const BatchesAhead&, wire::Plan&);
  std::vector<PendingRef> extract_valid(const BatchesAhead&, wire::Plan&);
  void plan_batches(const std::vector<PendingRef>&, wire::Plan&);
  std::optional<std::string> fault_of(const PendingTensor&) const;
  void plan_removals(const std::vector<PendingRef>&, wire::Plan&);
  void end_set(int process_set);
  RankSet members_of(const wire::Request&) const;
  std::string wait_text(const WaitInquiries::Result&, TimePoint now) const;
  void replay_if_steady(wire::Plan&);
  bool may_replay_now(int process_set) const;
  std::optional<std::uint32_t> agreed_slot(const PendingTensor&) const;
  wire::PlannedTensor plan_tensor(PendingRef);

  CoordinatorOptions options_;
  std::size_t ranks_;     ///< in the job
  ProcessSetTable sets_;  ///< as of the last plan decided
  ReadyTable table_;
  ResponseCache cache_;
  StallInspector stalls_;
  Replays replays_;
  std::uint64_t sequence_ = 0;

  PlanProgress progress_;
  FailedUses failed_uses_;

  Departures departures_;
  BlockedRanks blocked_;
  RepeatedPlan repeated_;
  WaitInquiries waits_;
  std::vector<PendingRef> grown_sets_;  ///< made by members, submitted since the last decide()
  std::optional<Status> join_failure_;  ///< of a join that failed in the current plan
};

}  // namespace hvd::control
