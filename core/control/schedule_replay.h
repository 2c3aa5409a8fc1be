#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/arrival_flags.h"
#include "control/negotiator.h"
#include "wire/messages.h"

namespace hvd::control {

/// The position of an operation in a replayed schedule. Kept by its owner, so that it is found
/// again without a search.
struct SchedulePlace {
  std::uint64_t replay = 0;  ///< counts the replays entered; 0: in none
  std::uint32_t batch = 0;
  std::uint32_t index = 0;
};

/// The steady state: all ranks repeat the batches that they have agreed on once, without
/// negotiating. One rank's side.
///
/// Positions count batches, from 1, across all replays of a job. At each position a rank arrives:
/// ready, when all operations of the batch are there; or leaving, when it has something that is not
/// in the schedule, or has been asked to. Nobody touches the data of a position before every rank
/// has arrived there ready. If one arrives leaving, all leave at that position, as nobody can have
/// passed it; what they had offered is negotiated in the ordinary way. So every rank runs the same
/// batches, and nothing is lost or done twice. See docs/decisions/0010-schedule-replay.md.
///
///   open --enter()--> replaying --somebody arrives leaving--> open
///
/// Not thread-safe: the thread that drives the engine.
class ScheduleReplay {
 public:
  enum class Outcome { kNothing, kRun, kLeft };
  struct Advance {
    Outcome outcome = Outcome::kNothing;
    std::size_t batch = 0;  ///< kRun: which of the schedule all ranks run now
    bool ring = false;      ///< the others have something to do
  };

  /// @param flags of the ranks of this host; none: there is no replay
  /// @param own position of this rank's in `flags`
  /// @param remote of all other hosts together, as DisseminationBarrier writes them; null when
  /// there are none
  ScheduleReplay(std::vector<ArrivalFlags*> flags, std::size_t own,
                 const ArrivalFlags* remote = nullptr)
      : flags_(std::move(flags)), own_(own), remote_(remote) {}

  bool available() const noexcept { return !flags_.empty(); }
  bool spans_hosts() const noexcept { return remote_ != nullptr; }
  bool replaying() const noexcept { return replaying_; }
  /// All ranks repeat these from now on. @pre !replaying(), and nothing is in a batch twice
  void enter(std::vector<AgreedBatch> schedule);
  /// An operation has been submitted. If it is not what comes in this schedule, this rank leaves.
  /// @param known what this returned for an equal request before; is brought up to date
  /// @return whether it has its place in the schedule, and waits there
  bool offer(const wire::Request&, SchedulePlace& known);
  /// Whether the schedule has such an operation, whether it has been offered already or not;
  /// `known` as in offer().
  bool find(const wire::Request&, SchedulePlace& known) const;
  /// This rank leaves at the next position at which it has not arrived.
  void leave_soon() noexcept { leaving_ = true; }
  /// This rank waits for what it has not offered itself.
  bool lacks_own() const noexcept { return replaying_ && !arrived_; }
  /// To be called again as long as something comes of it.
  Advance advance();
  /// This rank has arrived and the others do not come: they are to leave. They have to be rung.
  void ask_others_to_leave() noexcept;
  /// Batches run in this replay or, if it has been left, in the last one.
  std::uint64_t batches_run() const noexcept { return batches_run_; }
  std::size_t batches() const noexcept { return batches_.size(); }
  const AgreedBatch& batch(std::size_t number) const noexcept { return batches_[number].agreed; }

 private:
  struct Batch {
    AgreedBatch agreed = {};
    std::vector<std::uint8_t> offered = {};
    std::size_t missing = 0;
  };
  bool find_unnamed(const wire::Request&, SchedulePlace&) const;
  const wire::Request& planned(const SchedulePlace&) const noexcept;
  void arrive(bool leaving) noexcept;
  bool asked_to_leave() const noexcept;

  const std::vector<ArrivalFlags*> flags_;
  const std::size_t own_;
  const ArrivalFlags* const remote_;
  bool replaying_ = false;
  bool arrived_ = false;
  bool leaving_ = false;
  std::uint64_t position_ = 0;
  std::uint64_t batches_run_ = 0;
  std::size_t head_ = 0;
  std::vector<Batch> batches_;
  std::uint64_t replays_ = 0;                              // entered so far
  std::unordered_map<std::string, SchedulePlace> places_;  // by name
  std::vector<SchedulePlace> unnamed_places_;
};

/// When to start a replay, decided by the coordinator. A schedule is what the plans between two
/// uses of the same name have brought.
///
/// Starts one after two equal steps, or one of the schedule that was replayed last; later and later
/// when replays do not last. Never with a group whose members run in several batches: a replay that
/// is left between these would leave members behind, which wait for those that have run.
class StepLearner {
 public:
  /// @return whether the plan completes a step after which to start a replay
  bool observe(const wire::Plan&, const ResponseCache&);
  /// The batches of that step, by cache slot.
  const std::vector<std::vector<std::uint32_t>>& schedule() const noexcept {
    return current_.batches;
  }
  /// The replay has been left after so many batches.
  void note_left(std::uint64_t batches_run);

 private:
  struct Step {
    std::vector<std::vector<std::uint32_t>> batches = {};
    std::vector<std::uint32_t> slots = {};
  };
  bool learnable(const wire::Plan&, const ResponseCache&) const;
  static bool repeats_itself(const wire::Batch&);
  static bool splits_a_group(const wire::Plan&, const ResponseCache&);
  bool in_current(std::uint32_t slot) const noexcept { return slot < seen_.size() && seen_[slot]; }
  void add(const wire::Batch&);
  void begin_step();
  void forget();
  void close_step();
  static std::vector<std::uint32_t> sorted(std::vector<std::uint32_t>);

  Step current_;
  std::vector<bool> seen_;                    // by slot: is in the current step
  std::vector<std::uint32_t> previous_;       // slots, ascending
  std::vector<std::uint32_t> last_schedule_;  // slots of the schedule replayed last, ascending
  std::size_t last_schedule_batches_ = 0;
  std::uint64_t equal_steps_ = 0;  // before the current one, equal to `previous_`
  std::uint64_t backoff_ = 0;      // equal steps to wait for after replays that did not last
};

}  // namespace hvd::control
