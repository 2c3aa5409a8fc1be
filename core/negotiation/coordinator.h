#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "negotiation/blocked_ranks.h"
#include "negotiation/departures.h"
#include "negotiation/failed_uses.h"
#include "negotiation/messages.h"
#include "negotiation/plan_progress.h"
#include "negotiation/process_set_table.h"
#include "negotiation/ready_table.h"
#include "negotiation/repeated_plan.h"
#include "negotiation/response_cache.h"
#include "negotiation/schedule_replay.h"
#include "negotiation/stall_inspector.h"

namespace hvd::control {

/// With as many batches ahead of it, less than a full one is held back.
inline constexpr std::size_t kBusyBatches = 2;

/// How many batches rank 0 has in flight on the channel where a tensor of this process set and on
/// this device would run. None for sets without rank 0, whose channels it does not see. An empty
/// function: nothing is in flight.
using BatchesAhead = std::function<std::size_t(int process_set, DeviceType)>;

struct CoordinatorOptions {
  std::int64_t fusion_threshold = 64 << 20;
  std::size_t cache_capacity = 1024;
  bool schedule_lock = false;
  StallLimits stall = {};
  std::vector<std::string> host_of_rank = {"localhost"};  ///< its size is the number of ranks
};

/// Decides, on rank 0, what all ranks do next and in which order. Pure: reports and the time in,
/// plans out. Not thread-safe.
///
/// The same reports in any interleaving of the ranks give plans with the same content for the same
/// set of ready tensors. See Note [What a slot means] in response_cache.h.
class Coordinator {
 public:
  Coordinator(CoordinatorOptions, ProcessSetTable);

  /// Its cost depends on the operations and on the ranges of ranks in the report, not on the number
  /// of ranks.
  /// @throws hvd::Error when no correct peer can have sent the report
  void accept(const wire::Report&, TimePoint now);

  /// The rank waits for others and has submitted nothing for a while, as of that plan.
  void note_blocked(int rank, std::uint64_t last_applied);

  /// Something is ready, and all of it is small and on a device, where it may be fused with what
  /// comes: decide() may count what the device has not finished as in flight.
  bool may_gather_for_device() const;
  /// The next plan, or nothing to do. With two or more batches ahead of them, tensors that may
  /// share a batch are held back until one completes or a full batch of their sort has gathered:
  /// fusion without a timer. What shares no batch is never held back.
  std::optional<wire::Plan> decide(TimePoint now, const BatchesAhead&);

  /// For the other ranks: the bytes of the last plan, which are cheaper to make here where a plan
  /// repeats.
  wire::Bytes encode(const wire::Plan& plan) const { return repeated_.encode(plan); }

  /// The ranks have left the replay that the last plan with one began.
  void note_replay_left(std::uint64_t batches_run) { learner_.note_left(batches_run); }

  /// Texts for the log, each given once.
  std::vector<std::string> stall_warnings(TimePoint now) { return stalls_.warnings(table_, now); }
  /// The same of what has been warned of and goes on after all.
  std::vector<std::string> resumptions() { return stalls_.take_resumptions(); }
  /// What is waited for, oldest first: who is missing, and what those ranks did last.
  std::vector<std::string> waiting_texts(TimePoint now, std::size_t most) const {
    return stalls_.waiting_texts(table_, now, most);
  }
  /// When decide() or stall_warnings() may have something to say although no report comes.
  std::optional<TimePoint> next_deadline() const { return stalls_.next_deadline(table_); }
  /// Somebody waits for somebody.
  bool waiting() const noexcept { return !table_.pending().empty() || repeated_.waiting(); }
  /// The rank has left, whether or not it has reported so.
  void note_departed(int rank) { departures_.add(RankSet(rank)); }
  bool all_shut_down() const noexcept { return departures_.all(); }
  /// How many displaced cache entries and failed uses are remembered only because a rank may still
  /// refer to them.
  std::size_t displaced_entries() const noexcept { return cache_.displaced(); }
  std::size_t failed_uses() const noexcept { return failed_uses_.size(); }
  const ResponseCache& cache() const noexcept { return cache_; }

 private:
  /// Ranks that report the same, and what slots mean to them.
  struct Source {
    RankSpan ranks = {};
    std::uint64_t as_of = 0;
    TimePoint now{};
  };

  void check(const wire::Report&) const;
  bool accept_whole(const wire::Report&);
  void spread_whole(TimePoint now);
  std::optional<wire::Plan> repeat_plan(TimePoint now, const BatchesAhead&);
  ReadyTable::GoesOnGathering gathering_while(const BatchesAhead&) const;
  bool may_hold_back_repeated(const BatchesAhead&) const;
  void accept_hit(const Source&, std::uint32_t slot, std::uint64_t ordinal, wire::Stamp);
  void accept_request(const Source&, Askers, wire::Request);
  void accept_group(const wire::Report::Group&, const Source&, bool joins);
  const wire::Response& slot_as_seen(const Source&, std::uint32_t slot) const;
  void record_activity(const wire::Report::Section&, TimePoint now);
  void note_applied(RankSpan ranks, std::uint64_t sequence);

  void fail(PendingRef, const Status&, wire::Plan&);
  void fail_stalled(TimePoint now, wire::Plan&);
  void fail_deadlocked(TimePoint now, wire::Plan&);
  void fail_for_shutdown(wire::Plan&);
  void fail_what_counts_on_joined(wire::Plan&);
  std::optional<Status> hopeless(const PendingTensor&) const;
  void plan_ready(TimePoint now, const BatchesAhead&, wire::Plan&);
  std::vector<PendingRef> take_sound(const BatchesAhead&, wire::Plan&);
  void plan_batches(const std::vector<PendingRef>&, wire::Plan&);
  std::optional<std::string> fault_of(const PendingTensor&) const;
  void end_set(int process_set);
  void replay_if_steady(wire::Plan&);
  std::optional<std::uint32_t> agreed_slot(const PendingTensor&) const;
  wire::PlannedTensor plan_tensor(PendingRef);

  CoordinatorOptions options_;
  std::size_t ranks_;  ///< in the job
  ProcessSetTable sets_;  ///< as of the last plan decided
  ReadyTable table_;
  ResponseCache cache_;
  StallInspector stalls_;
  StepLearner learner_;
  std::uint64_t replay_plan_ = 0;  ///< the last plan with a replay
  std::uint64_t sequence_ = 0;

  PlanProgress progress_;
  FailedUses failed_uses_;

  Departures departures_;
  BlockedRanks blocked_;
  RepeatedPlan repeated_;
  std::optional<Status> join_failure_;  ///< of a kJoin that has failed just now
};

}  // namespace hvd::control
