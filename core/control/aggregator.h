#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "control/negotiator.h"
#include "wire/messages.h"

namespace hvd::control {

/// The ranks that want to leave, except those that said so before the replay began: applying its
/// plan withdraws whatever a rank had reported.
RankSet leaving_since(const wire::MergedReport&, std::uint64_t replay_plan);

/// Merges the reports that pass through an inner rank of the tree (its own, its children's, merged
/// or not) into messages for the next rank. Pure; not thread-safe.
///
/// It holds back what somebody below has not asked for yet: the coordinator could do nothing with
/// it. See Note [What is held back] in aggregator.cpp.
class Aggregator {
 public:
  /// @param subtree the ranks whose reports pass here
  /// @param state of this rank; it outlives the aggregator
  /// @param longest_hold nothing is held back longer
  Aggregator(RankSet subtree, const Negotiator& state, Duration longest_hold);

  /// A report of a rank that is a child (or this one).
  void accept(int rank, const wire::Report&, TimePoint now);
  /// What a child has merged.
  void accept(const wire::MergedReport&, TimePoint now);
  /// @pre this rank's negotiator has applied it
  void note_plan(const wire::Plan&);

  /// What must be forwarded now.
  std::optional<wire::MergedReport> take(TimePoint now);
  /// When take() will give something although nothing more comes.
  std::optional<TimePoint> deadline() const;
  bool holds_anything() const noexcept { return !stores_.empty(); }
  /// Whether it forwards everything at once, as it does while anything unusual is pending.
  bool open() const noexcept { return open_; }

 private:
  /// Hits that the same ranks have reported, all of one process set.
  struct Hits {
    wire::SlotSet slots = {};
    RankSet ranks = {};
    std::uint64_t report_number = 0;
    int process_set = 0;
    TimePoint since{};
  };
  /// Ranks that ask for a name alike; by a hit if unnamed and cached, else in full.
  struct Variant {
    RankSet ranks = {};
    std::optional<wire::UnnamedHit> hit = {};
    wire::StampedRequest asked = {};
  };
  struct Named {
    std::string key = {};
    int process_set = 0;
    RankSet said = {};
    std::vector<Variant> variants = {};
    TimePoint since{};
  };
  /// What a cache slot holds.
  struct Meaning {
    int process_set = 0;
    std::string name = {};  ///< empty if unnamed
    OpKind kind = OpKind::kAllreduce;
    bool operator==(const Meaning&) const = default;
  };
  struct FormerMeaning {
    Meaning meaning = {};
    std::uint64_t until = 0;  ///< the plan that put something else into the slot
  };
  /// Reports whose slots refer to the cache as of the same plan.
  struct Store {
    std::vector<Hits> hits = {};
    std::vector<Named> named = {};
    std::unordered_map<std::string, std::size_t> by_key = {};
    bool empty() const noexcept { return hits.empty() && named.empty(); }
  };

  const Meaning* meaning_of(std::uint32_t slot, std::uint64_t as_of) const;
  Store& store_for(std::uint64_t as_of);
  void note_applied(RankSpan ranks, std::uint64_t last_applied);
  void add_hits(Store&, wire::SlotSet slots, RankSpan ranks, std::uint64_t report_number,
                TimePoint now);
  void add_hits_of_set(Store&, wire::SlotSet slots, RankSpan ranks, std::uint64_t report_number,
                       int process_set, TimePoint now);
  void add_unnamed_hit(Store&, const wire::StampedUnnamedHit&, RankSpan ranks, std::uint64_t as_of,
                       TimePoint now);
  void add_request(Store&, wire::StampedRequest, RankSpan ranks, TimePoint now);
  void add_named(Store&, std::string key, int process_set, Variant, TimePoint now);
  RankSpan expected(int process_set);
  bool complete(RankSpan said, int process_set) {
    return hvd::contains(said, expected(process_set));
  }
  void close_if_done();
  void move_out(Store&, wire::MergedReport::Section&);
  void remember(const Hits&, std::uint64_t as_of);
  void forget(int process_set, const std::string& name);
  void forget(const wire::PlannedTensor&);
  void begin_epoch(std::uint64_t sequence);
  void forget_for_replay(std::uint64_t sequence);

  const RankSet subtree_;
  const Negotiator& state_;
  const Duration longest_hold_;

  /// The last plan that changed more than the order of the cache: what is reported after it or any
  /// later plan means the same.
  std::uint64_t epoch_ = 0;
  std::uint64_t replay_plan_ = 0;  ///< the last plan that began a replay
  std::vector<Meaning> meanings_;  // per slot, since the epoch began
  std::map<std::uint32_t, std::vector<FormerMeaning>> former_meanings_;  // oldest first
  wire::SlotSet foreign_slots_;            // of other process sets than 0
  std::map<int, RankSet> expected_;        // process set -> its members in the subtree
  std::map<std::uint64_t, Store> stores_;  // none of them empty
  std::map<std::uint64_t, RankSet> applied_;
  RankSet leaving_;
  RankSet ended_;  ///< those of them that have not called shutdown()
  std::unordered_map<int, std::uint64_t> report_numbers_;  // of ranks that do not merge
  bool anything_complete_ = false;
  bool overdue_ = false;
  bool acknowledged_ = false;  ///< somebody had nothing else to say
  bool anyone_left_ = false;
  bool joining_ = false;  ///< somebody below has joined, and no plan has ended that
  std::string join_name_ = {};

  bool open_ = false;
  /// What has gone on before all below had asked for it, and no plan has ended yet.
  wire::SlotSet open_slots_;
  std::unordered_set<std::string> open_names_;
  std::uint64_t remembered_at_ = 0;  ///< the last plan then
};

}  // namespace hvd::control
