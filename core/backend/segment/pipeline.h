#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "backend/segment/channel_segment.h"

namespace hvd::segment {

/// What a member does in a round, in this order. A pipeline may do without some of them.
///
///   kFill     puts its input into its slot
///   kReduce   does what needs the members' inputs: reduces its share of them, or copies
///   kSettle   its share of the result is in the result's slot
///   kTake     copies the result out
///   kRelease  needs nothing of the round any more
enum class Phase : std::uint8_t { kFill, kReduce, kSettle, kTake, kRelease };
inline constexpr std::size_t kPhases = 5;

/// When a round may go through a phase, and what the others learn of it.
struct PhaseRule {
  Phase phase = Phase::kFill;
  /// Counts the rounds that have got through it; null: nobody waits for it.
  ChannelSegment::Counter publishes = nullptr;
  /// Every member must have published the round `behind` before this one here; null: the work alone
  /// says when.
  ChannelSegment::Counter waits_for = nullptr;
  std::uint64_t behind = 0;
};
/// In the order of the phases; the last one ends a round.
using PhaseRules = std::span<const PhaseRule>;

/// One collective's way through a segment: how many of its rounds this member has brought through
/// each phase, and which may go on. What a phase does is the work's business.
///
/// Several rounds are under way at the same time, one behind the other:
///
///   round 0   fill  reduce  take
///   round 1         fill    reduce  take
///   round 2                 fill    reduce  take          a slot is used by every second round
///
/// A rule is an arrow between members: reduce(r) needs fill(r) of all of them, fill(r) the release
/// of round r - 2. There is nothing else between them, neither a lock nor a barrier, and no counter
/// ever goes back.
///
/// Not thread-safe: the thread that drives the engine.
class Pipeline {
 public:
  explicit Pipeline(ChannelSegment& segment) noexcept : segment_(segment) {}

  /// A collective of so many rounds begins, behind the last one.
  void begin(PhaseRules rules, std::uint64_t rounds) noexcept;
  /// While the collective runs, from a phase of a round: the same on every member in the same
  /// round.
  void set_rules(PhaseRules rules) noexcept { rules_ = rules; }
  void set_rounds(std::uint64_t rounds) noexcept { rounds_ = rounds; }
  std::uint64_t rounds() const noexcept { return rounds_; }

  /// Brings one round through one phase, the last phase first: it frees what others wait for. Rings
  /// before it runs a phase: others do not sleep while this member works.
  /// @param run (phase, round) does what the phase is, or returns false: not yet
  /// @return whether there was one
  template <class Run>
  bool advance(const Run& run);
  /// All rounds are through; then the segment's next collective begins behind them.
  bool finish() noexcept;
  /// Rings the others if one may wait for what was done since the last call.
  void ring() noexcept {
    if (std::exchange(awaited_, false)) segment_.ring_others();
  }

  /// Rounds that this member has brought through a phase.
  std::uint64_t done(Phase phase) const noexcept { return done_[static_cast<std::size_t>(phase)]; }
  /// Every member has published the round `behind` before this one.
  bool reached(ChannelSegment::Counter counter, std::uint64_t round,
               std::uint64_t behind = 0) const noexcept {
    const std::uint64_t rounds = number(round) + 1;
    return rounds <= behind || segment_.all_reached(counter, rounds - behind);
  }
  /// The number of a round of this collective among all of the segment's.
  std::uint64_t number(std::uint64_t round) const noexcept { return first_ + round; }

 private:
  void complete(const PhaseRule& rule) noexcept;
  bool awaited(ChannelSegment::Counter counter, std::uint64_t rounds) const noexcept;

  ChannelSegment& segment_;
  PhaseRules rules_;
  std::uint64_t first_ = 0;  ///< the number of round 0
  std::uint64_t rounds_ = 0;
  std::array<std::uint64_t, kPhases> done_ = {};
  bool awaited_ = false;  ///< others may wait for what this member has just done
};

template <class Run>
bool Pipeline::advance(const Run& run) {
  for (std::size_t at = rules_.size(); at-- > 0;) {
    const PhaseRule& rule = rules_[at];
    const std::uint64_t round = done(rule.phase);
    const std::uint64_t here = at == 0 ? rounds_ : done(rules_[at - 1].phase);
    if (round == here) continue;
    if (rule.waits_for != nullptr && !reached(rule.waits_for, round, rule.behind)) continue;
    ring();
    if (!run(rule.phase, round)) continue;
    complete(rules_[at]);  // by the rules that hold now
    return true;
  }
  return false;
}

}  // namespace hvd::segment
