#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "negotiation/held_reports.h"
#include "negotiation/messages.h"
#include "negotiation/negotiator.h"
#include "negotiation/open_state.h"

namespace hvd::control {

/// The ranks that want to leave, except those that said so before the replay began: applying its
/// plan withdraws whatever a rank had reported.
RankSet leaving_since(const wire::Report&, std::uint64_t replay_plan);

/// Merges the reports that pass through an inner rank of the tree (its own and its children's) into
/// messages for the next rank. Pure; not thread-safe.
///
/// It holds back what somebody below has not asked for yet: the coordinator could do nothing with
/// it. See Note [What is held back] in aggregator.cpp.
class Aggregator {
 public:
  /// @param subtree the ranks whose reports pass here
  /// @param state of this rank; it outlives the aggregator
  /// @param longest_hold nothing is held back longer
  Aggregator(RankSet subtree, const Negotiator& state, Duration longest_hold);
  Aggregator(const Aggregator&) = delete;
  Aggregator& operator=(const Aggregator&) = delete;

  /// A report of this rank or of a child.
  void accept(const wire::Report&, TimePoint now);
  /// @pre this rank's negotiator has applied it
  void note_plan(const wire::Plan&);

  /// What must be forwarded now.
  std::optional<wire::Report> take(TimePoint now);
  /// When take() will give something although nothing more comes.
  std::optional<TimePoint> deadline() const;
  bool holds_anything() const noexcept { return !held_.empty(); }
  /// Whether it forwards everything at once, as it does while anything unusual is pending.
  bool open() const noexcept { return open_.open(); }

 private:
  HeldReports& held_as_of(std::uint64_t as_of);
  void note_applied(RankSpan ranks, std::uint64_t last_applied);
  void add_hits(HeldReports&, wire::SlotSet slots, RankSpan ranks, std::uint64_t report_number,
                TimePoint now);
  void add_unnamed_hit(HeldReports&, const wire::StampedUnnamedHit&, RankSpan ranks,
                       std::uint64_t as_of, TimePoint now);
  void add_request(HeldReports&, wire::StampedRequest, RankSpan ranks, TimePoint now);
  void add_named(HeldReports&, std::string key, int process_set, HeldReports::Variant,
                 TimePoint now);
  void close_if_done() noexcept;
  void pass_on_overdue() noexcept;
  void move_out(HeldReports&, wire::Report::Section&);
  void begin_epoch(std::uint64_t sequence);
  void forget_for_replay(std::uint64_t sequence);

  SubtreeMembers members_;
  const Negotiator& state_;
  const Duration longest_hold_;

  /// The last plan that changed more than the order of the cache: what is reported after it or any
  /// later plan means the same.
  std::uint64_t epoch_ = 0;
  std::uint64_t replay_plan_ = 0;  ///< the last plan that began a replay
  /// By the plan that the slots in it refer to the cache of.
  std::map<std::uint64_t, HeldReports> held_;  // none of them empty
  std::map<std::uint64_t, RankSet> applied_;
  RankSet leaving_;
  RankSet ended_;  ///< those of them that have not called shutdown()
  bool anything_complete_ = false;
  bool overdue_ = false;
  bool acknowledged_ = false;  ///< somebody had nothing else to say
  OpenState open_;
};

}  // namespace hvd::control
