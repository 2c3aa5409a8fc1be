#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/rank_set.h"
#include "negotiation/messages.h"
#include "negotiation/process_set_table.h"

namespace hvd::control {

/// Which ranks below an aggregator will ask for what concerns a process set. Pure; not thread-safe.
class SubtreeMembers {
 public:
  /// @param sets outlives it
  SubtreeMembers(RankSet subtree, const ProcessSetTable& sets)
      : subtree_(std::move(subtree)), sets_(sets) {}

  RankSpan of(int process_set);
  bool complete(RankSpan said, int process_set) { return hvd::contains(said, of(process_set)); }
  /// The process sets may have changed.
  void forget_sets() noexcept { of_set_.clear(); }

 private:
  const RankSet subtree_;
  const ProcessSetTable& sets_;
  std::map<int, RankSet> of_set_;  // but for set 0
};

/// What ranks have asked for as of one plan, each thing once with the ranks that asked for it
/// alike, until it goes on. Pure; not thread-safe.
class HeldReports {
 public:
  /// Ranks that ask for a name alike; by a hit if unnamed and cached, else in full.
  struct Variant {
    RankSet ranks = {};
    std::optional<wire::SlotUse> hit = {};
    wire::StampedRequest asked = {};
  };
  /// What has gone on before all had asked for it.
  struct InParts {
    wire::SlotSet slots = {};
    std::vector<std::string> keys = {};
  };

  bool empty() const noexcept { return hits_.empty() && named_.empty(); }
  /// When the oldest of it was first asked for.
  std::optional<TimePoint> oldest() const;

  // @return whether there is something that all who are expected have asked for now
  bool add_hits(wire::SlotSet, RankSpan, std::uint64_t report_number, int process_set,
                TimePoint now, SubtreeMembers&);
  bool add_named(std::string key, int process_set, Variant, TimePoint now, SubtreeMembers&);

  /// Moves what all who are expected have asked for.
  void move_complete(wire::Report::Section&, SubtreeMembers&);
  /// Moves everything. @param members null: nothing counts as complete
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
    RankSet said = {};
    std::vector<Variant> variants = {};
    TimePoint since{};
  };
  static void move_out(Hits&, wire::Report::Section&);
  static void move_out(Named&, wire::Report::Section&);

  std::vector<Hits> hits_;
  std::vector<Named> named_;
  std::unordered_map<std::string, std::size_t> by_key_;  // index into named_
};

}  // namespace hvd::control
