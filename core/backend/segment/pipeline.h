#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "backend/segment/channel_segment.h"

namespace hvd::segment {

/// The phases of a round, in order. A pipeline may leave some of them out.
///
///   kFill      the member copies its input into its input buffer
///   kReduce    it reduces its share of the members' inputs, or copies the inputs
///   kSettle    it waits until its share of the result is in the result buffer
///   kCopyOut   it copies the result out
///   kRelease   it stops using the round's buffers
enum class RoundPhase : std::uint8_t { kFill, kReduce, kSettle, kCopyOut, kRelease };
inline constexpr std::size_t kPhases = 5;

/// When a round may enter a phase, and which counter publishes its end.
struct PhaseRule {
  RoundPhase phase = RoundPhase::kFill;
  /// The counter of rounds that have completed this phase; null: no member waits for it.
  ChannelSegment::Counter publishes = nullptr;
  /// The counter by which every member must have published the round that is `behind` rounds before
  /// this one; null: only the Work decides.
  ChannelSegment::Counter waits_for = nullptr;
  std::uint64_t behind = 0;
};
/// In the order of the phases; the last one ends a round.
using PhaseRules = std::span<const PhaseRule>;

/// Counts the rounds of a collective that have completed each phase on this member, and selects the
/// next phase to run. The Work implements the phases.
///
/// Several rounds are under way at the same time:
///
///   round 0   fill  reduce  copy out
///   round 1         fill    reduce    copy out
///   round 2                 fill      reduce    copy out  every second round uses the same buffer
///
/// A rule is an arrow between members: reduce(r) needs fill(r) of all of them, and fill(r) needs
/// the release of round r - 2. The members have no other synchronisation, neither a lock nor a
/// barrier, and no counter ever decreases.
///
/// Not thread-safe: only the thread that drives the engine uses it.
class Pipeline {
 public:
  explicit Pipeline(ChannelSegment& segment) noexcept : segment_(segment) {}

  /// Begins a collective of `rounds` rounds after the previous one.
  void begin(PhaseRules rules, std::uint64_t rounds) noexcept;
  /// set_rules() and set_rounds() may be called from within a phase. Every member must make the
  /// same call in the same round.
  void set_rules(PhaseRules rules) noexcept { rules_ = rules; }
  void set_rounds(std::uint64_t rounds) noexcept { rounds_ = rounds; }
  std::uint64_t rounds() const noexcept { return rounds_; }

  /// Runs one phase of one round. Tries the last phase first, because it frees buffers that other
  /// members wait for. Rings before it runs a phase, so that they do not sleep while this member
  /// works.
  /// @param run (phase, round) runs the phase; returns false if it cannot yet
  /// @return whether a phase was run
  template <class Run>
  bool advance(const Run& run);
  /// Returns true once all rounds have completed their last phase. The next collective of the
  /// segment then begins after them.
  bool finish() noexcept;
  /// Call this before the only round of a collective is filled ahead. See Note [Filled on
  /// arrival].
  void begin_filled() noexcept;
  /// Ends the collective of begin_filled().
  void end_filled() noexcept;
  /// Rings the other members if one of them may be waiting for a phase that has ended since the
  /// last call.
  void ring() noexcept {
    if (std::exchange(awaited_, false)) segment_.ring_others();
  }

  /// The number of rounds that have completed this phase on this member.
  std::uint64_t done(RoundPhase phase) const noexcept {
    return done_[static_cast<std::size_t>(phase)];
  }
  /// Whether every member has published the round that is `behind` rounds before this one.
  bool reached(ChannelSegment::Counter counter, std::uint64_t round,
               std::uint64_t behind = 0) const noexcept {
    const std::uint64_t rounds = number(round) + 1;
    if (rounds <= behind) return true;
    const bool known = counter == &ChannelSegment::MemberState::released &&
                       rounds - behind <= segment_.released_by_all;
    return known || segment_.all_reached(counter, rounds - behind);
  }
  /// The number of a round of this collective among all rounds of the segment.
  std::uint64_t number(std::uint64_t round) const noexcept { return first_ + round; }

 private:
  void complete(const PhaseRule& rule) noexcept;
  bool awaited(ChannelSegment::Counter counter, std::uint64_t rounds) const noexcept;

  ChannelSegment& segment_;
  PhaseRules rules_;
  std::uint64_t first_ = 0;  ///< the number of round 0
  std::uint64_t rounds_ = 0;
  std::array<std::uint64_t, kPhases> done_ = {};
  bool awaited_ = false;  ///< others may wait for a phase that has just ended
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
    complete(rules_[at]);  // `run` may have changed the rules
    return true;
  }
  return false;
}

inline void Pipeline::begin(PhaseRules rules, std::uint64_t rounds) noexcept {
  rules_ = rules;
  rounds_ = rounds;
  first_ = segment_.next_round;
  done_ = {};
  awaited_ = false;
}

inline bool Pipeline::finish() noexcept {
  const bool finished = done(rules_.back().phase) == rounds_;
  if (finished) {
    segment_.next_round = number(rounds_);
    segment_.last_rounds = rounds_;
  }
  return finished;
}

// Note [Filled on arrival]
//
// The ranks that replay a schedule wait for each other before they start a batch, and a small
// collective is one round that waits for all inputs. One wait serves both: a member copies its
// input to its buffer before it arrives at the batch's position, so that the arrival of all members
// shows that all inputs are there (control::ScheduleReplay). The last collective on the channel
// must have had one round, r - 1. Then the buffer of round r is free, and no counter has to be
// read: a member fills round r - 1 after it has completed all earlier collectives. So when this
// member has completed round r - 1, all members have released round r - 2, which used the same
// buffer.
//
// `filled` is not published, because no member waits for it. If a rank leaves the schedule instead,
// no member has read the buffers, and the next collective fills them again. `released` is published
// without checking the other members, because no member can wait for it yet. A member begins the
// next ordinary collective after all members have arrived at its position or have reported that
// they left. They do so only after they have released round r.
inline void Pipeline::begin_filled() noexcept {
  HVD_EXPECT(segment_.last_rounds == 1, "the input buffer is free");
  begin({}, 1);
}

inline void Pipeline::end_filled() noexcept {
  segment_.publish_unordered(&ChannelSegment::MemberState::released, number(1));
  segment_.released_by_all = number(0);
  segment_.next_round = number(1);
  segment_.last_rounds = 1;
}

inline void Pipeline::complete(const PhaseRule& rule) noexcept {
  const std::uint64_t rounds = number(++done_[static_cast<std::size_t>(rule.phase)]);
  if (rule.publishes == nullptr) return;
  segment_.publish(rule.publishes, rounds);
  awaited_ = awaited_ || awaited(rule.publishes, rounds);
}

// Note [Ring by the last member]
//
// A member only ever waits until every member has reached a round, so only the last member to reach
// it has to ring. Every access is sequentially consistent. If two members are last at the same
// time, at least one of them sees the other's counter. Either this member sees that it is the last,
// or the others see its counter before they sleep. Only a member that is ahead by as many rounds as
// there are buffers waits for a buffer to become free, and such a member has published its counter
// before it checks.
inline bool Pipeline::awaited(ChannelSegment::Counter counter,
                              std::uint64_t rounds) const noexcept {
  if (!segment_.all_reached(counter, rounds)) return false;
  for (const PhaseRule& rule : rules_) {
    if (rule.waits_for == counter && rule.behind > 0)
      return segment_.other_reached(rule.publishes, rounds + rule.behind - 1);
  }
  return true;
}

}  // namespace hvd::segment
