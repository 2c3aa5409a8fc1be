#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "negotiation/equal_reports.h"
#include "negotiation/messages.h"
#include "negotiation/negotiator.h"
#include "negotiation/process_set_table.h"
#include "negotiation/response_cache.h"

namespace hvd::control {

/// The members of each process set in an aggregator's subtree. Pure; not thread-safe.
class SubtreeMembers {
 public:
  /// @param sets outlives the object
  SubtreeMembers(RankSet subtree, const ProcessSetTable& sets)
      : subtree_(std::move(subtree)), sets_(sets) {}

  RankSpan of(int process_set);
  /// Whether `ranks` contains every member of the process set in the subtree.
  bool complete(RankSpan ranks, int process_set) { return hvd::contains(ranks, of(process_set)); }
  /// Called when the process sets may have changed.
  void forget_sets() noexcept { of_set_.clear(); }

 private:
  const RankSet subtree_;
  const ProcessSetTable& sets_;
  std::map<int, RankSet> of_set_;  // except set 0
};

/// The operations that ranks have requested as of one plan and that have not been forwarded yet.
/// Equal requests are held once, with their ranks. Pure; not thread-safe.
class HeldReports {
 public:
  /// Ranks that have made the same request for a name: as a hit if it is unnamed and cached,
  /// otherwise in full.
  struct Variant {
    RankSet ranks = {};
    std::optional<wire::SlotUse> hit = {};
    wire::StampedRequest request = {};
  };
  /// Operations that were forwarded before every member below had requested them.
  struct InParts {
    wire::SlotSet slots = {};
    std::vector<std::string> keys = {};
  };

  bool empty() const noexcept { return hits_.empty() && named_.empty(); }
  /// When the oldest operation was first requested.
  std::optional<TimePoint> oldest() const;

  // @return whether some operation has now been requested by every member below
  bool add_hits(wire::SlotSet, RankSpan, std::uint64_t report_number, int process_set,
                TimePoint now, SubtreeMembers&);
  bool add_named(std::string key, int process_set, Variant, TimePoint now, SubtreeMembers&);

  /// Moves the operations that every member below has requested.
  void move_complete(wire::Report::Section&, SubtreeMembers&);
  /// Moves all operations. @param members null: no operation counts as complete
  InParts move_all(wire::Report::Section&, SubtreeMembers* members);

 private:
  /// Hits that the same ranks have reported, all of one process set.
  struct Hits {
    wire::SlotSet slots = {};
    RankSet ranks = {};
    std::uint64_t report_number = 0;
    int process_set = 0;
    TimePoint since{};
  };
  struct Named {
    std::string key = {};
    int process_set = 0;
    RankSet requested_by = {};
    std::vector<Variant> variants = {};
    TimePoint since{};
  };
  static void move_out(Hits&, wire::Report::Section&);
  static void move_out(Named&, wire::Report::Section&);

  std::vector<Hits> hits_;
  std::vector<Named> named_;
  std::unordered_map<std::string, std::size_t> by_key_;  // index into named_
};

/// Whether an aggregator forwards every report at once, and the reasons for it: operations that
/// were forwarded in parts, a join, a rank that leaves. See Note [Holding reports back] in
/// aggregator.cpp. Pure; not thread-safe.
class PassThrough {
 public:
  /// @param cache of this rank; it outlives the object
  explicit PassThrough(const ResponseCache& cache) noexcept : cache_(cache) {}

  bool active() const noexcept { return active_; }
  /// Passes reports through from now on, until stop_if_done().
  void start() noexcept { active_ = true; }
  /// Stops unless a reason remains. @pre no report is held back (unchecked: the aggregator holds
  /// them)
  void stop_if_done() noexcept;
  /// Call this when a rank leaves: passes reports through until the next replay.
  void start_leave() noexcept { active_ = anyone_left_ = true; }

  /// Call this when a rank has joined: passes reports through until a plan has ended the join.
  /// @param name of the operation
  void start_join(const std::string& name);
  bool joining() const noexcept { return joining_; }

  /// Records operations that were forwarded in parts, and passes reports through until plans have
  /// ended all of them.
  /// @param as_of the slots refer to the cache as of this plan
  /// @param last_applied the last plan that this rank has applied
  void remember(const HeldReports::InParts&, std::uint64_t as_of, std::uint64_t last_applied);
  /// Forgets the operations that the plan ends. Called after the plan has changed the cache.
  void apply(const wire::Plan&);
  /// Remembers operations by name instead of by slot if the plan has put other responses into their
  /// slots.
  void follow_displaced(std::uint64_t plan);
  void drop_removed(const ProcessSetTable&);
  /// Forgets all reasons: the ranks submit everything again.
  void reset();

 private:
  void forget(int process_set, const std::string& name, std::uint64_t as_of);
  void forget(const wire::PlannedTensor&, std::uint64_t as_of);
  bool in_parts() const noexcept { return !slots_.empty() || !keys_.empty(); }

  const ResponseCache& cache_;
  bool active_ = false;
  bool anyone_left_ = false;
  bool joining_ = false;  ///< a join has begun that no plan has ended yet
  std::string join_name_;
  // Operations that were forwarded in parts and that no plan has ended yet.
  wire::SlotSet slots_;
  std::unordered_set<std::string> keys_;  // tensor_key()
  std::uint64_t remembered_at_ = 0;       ///< the last plan at the last remember()
};

/// The ranks that leave, except those that reported this before the replay began: a rank that
/// applies the replay's plan withdraws everything that it had reported.
RankSet leaving_since(const wire::Report&, std::uint64_t replay_plan);

/// Merges the reports that pass through an inner rank of the tree (its own and its children's) into
/// messages for the next rank. Pure; not thread-safe.
///
/// Holds an operation back until every member below has requested it, because the coordinator
/// cannot plan it earlier. See Note [Holding reports back] in aggregator.cpp.
class Aggregator {
 public:
  /// @param subtree the ranks whose reports pass here
  /// @param state of this rank; it outlives the aggregator
  /// @param longest_hold how long a report may be held back
  Aggregator(RankSet subtree, const Negotiator& state, Duration longest_hold);
  Aggregator(const Aggregator&) = delete;
  Aggregator& operator=(const Aggregator&) = delete;

  /// Adds a report of this rank or of a child.
  /// @param merged its `known` groups were decoded with the present known_items()
  void accept(wire::Report merged, TimePoint now);
  /// The bytes of items that further reports of children are likely to contain, for wire::decode().
  /// Valid until the next call of a function that is not const.
  std::span<const std::byte> known_items() const noexcept { return equal_.known_items(); }
  /// @pre this rank's negotiator has applied the plan
  void apply(const wire::Plan&);

  /// The report to forward now, if any.
  std::optional<wire::Report> next_report(TimePoint now);
  /// The time at which next_report() will return a report even if no message arrives.
  std::optional<TimePoint> deadline() const;
  bool holds_anything() const noexcept { return !held_.empty() || !equal_.empty(); }
  /// Whether the aggregator forwards every report at once. See PassThrough.
  bool passing_through() const noexcept { return pass_through_.active(); }

 private:
  bool keep_if_equal(std::vector<wire::Report::Section>&, TimePoint now);
  bool may_keep(const wire::Report::Group&, std::uint64_t as_of) const;
  void release_equal();
  void add_group(HeldReports&, wire::Report::Group, std::uint64_t as_of, TimePoint now);
  HeldReports& held_as_of(std::uint64_t as_of);
  void record_applied(RankSpan ranks, std::uint64_t last_applied);
  void add_hits(HeldReports&, wire::SlotSet slots, RankSpan ranks, std::uint64_t report_number,
                TimePoint now);
  void add_unnamed_hit(HeldReports&, const wire::StampedUnnamedHit&, RankSpan ranks,
                       std::uint64_t as_of, TimePoint now);
  void add_request(HeldReports&, wire::StampedRequest, RankSpan ranks, TimePoint now);
  void add_named(HeldReports&, std::string key, int process_set, HeldReports::Variant,
                 TimePoint now);
  void stop_if_done() noexcept;
  void forward_overdue() noexcept;
  void move_out(HeldReports&, wire::Report::Section&);
  void begin_epoch(std::uint64_t sequence);
  void forget_for_replay(std::uint64_t sequence);

  SubtreeMembers members_;
  const Negotiator& state_;
  const Duration longest_hold_;

  /// The last plan that changed more than the order of the cache. Slots in reports as of this plan
  /// and as of any later one mean the same.
  std::uint64_t epoch_ = 0;
  std::uint64_t replay_plan_ = 0;  ///< the last plan that began a replay
  /// Keyed by the plan that the slots refer to.
  std::map<std::uint64_t, HeldReports> held_;  // no entry is empty
  EqualReports equal_;  ///< as of epoch_ or later; held_ is empty while reports are kept here
  std::map<std::uint64_t, RankSet> applied_;
  RankSet leaving_;
  RankSet ended_;  ///< the leaving ranks that have not called shutdown()
  bool anything_complete_ = false;
  bool overdue_ = false;
  bool acknowledged_ = false;  ///< some rank reported only the plan that it has applied
  PassThrough pass_through_;
};

}  // namespace hvd::control
