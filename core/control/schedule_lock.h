#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/lock_words.h"
#include "control/negotiator.h"
#include "wire/messages.h"

namespace hvd::control {

/// Where an operation stands in a locked schedule. Remembered by its owner, so that it is found
/// again without a search.
struct SchedulePlace {
  std::uint64_t lock = 0;  ///< counts the locks entered; 0: in none
  std::uint32_t batch = 0;
  std::uint32_t index = 0;
};

/// The steady state: all ranks repeat the batches that they have agreed on once, without
/// negotiating. One rank's side.
///
/// Positions count batches, from 1, through all locks of a job. At each position a rank arrives:
/// ready, when all operations of the batch are there; or leaving, when it has something that is not
/// in the schedule, or has been asked to. Nobody touches the data of a position before every rank
/// has arrived there ready. If one arrives leaving, all leave at that position, as nobody can have
/// passed it; what they had offered is negotiated in the ordinary way. So every rank runs the same
/// batches, and nothing is lost or done twice. See docs/decisions/0010-schedule-lock.md.
///
///   open --enter()--> locked --somebody arrives leaving--> open
///
/// Not thread-safe: the thread that drives the engine.
class ScheduleLock {
 public:
  enum class Outcome { kNothing, kRun, kLeft };
  struct Advance {
    Outcome outcome = Outcome::kNothing;
    std::size_t batch = 0;  ///< kRun: which of the schedule all ranks run now
    bool ring = false;      ///< the others have something to do
  };

  /// @param words of the ranks of this host, or none: there is no lock then
  /// @param own position of this rank's in `words`
  /// @param outside of all other hosts together, as LockRelay writes them; null when there are none
  ScheduleLock(std::vector<LockWords*> words, std::size_t own, const LockWords* outside = nullptr)
      : words_(std::move(words)), own_(own), outside_(outside) {}

  bool available() const noexcept { return !words_.empty(); }
  bool spans_hosts() const noexcept { return outside_ != nullptr; }
  bool locked() const noexcept { return locked_; }
  /// All ranks repeat these from now on. @pre !locked(), and nothing is in a batch twice
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
  bool lacks_own() const noexcept { return locked_ && !arrived_; }
  /// To be called again as long as something comes of it.
  Advance advance();
  /// This rank has arrived and the others do not come: they are to leave. They have to be rung.
  void ask_others_to_leave() noexcept;
  /// Batches run in this lock or, if it has been left, in the last one.
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

  const std::vector<LockWords*> words_;
  const std::size_t own_;
  const LockWords* const outside_;
  bool locked_ = false;
  bool arrived_ = false;
  bool leaving_ = false;
  std::uint64_t position_ = 0;
  std::uint64_t batches_run_ = 0;
  std::size_t head_ = 0;
  std::vector<Batch> batches_;
  std::uint64_t locks_ = 0;                                // entered so far
  std::unordered_map<std::string, SchedulePlace> places_;  // by name
  std::vector<SchedulePlace> unnamed_places_;
};

/// When to lock, decided by the coordinator. A schedule is what the plans between two uses of the
/// same name have brought.
///
/// Locks after two equal steps, or one of the schedule that was locked last; later and later when
/// locks do not last.
class StepLearner {
 public:
  /// @return whether the plan completes a step after which to lock
  bool observe(const wire::Plan&, const ResponseCache&);
  /// The batches of that step, by cache slot.
  const std::vector<std::vector<std::uint32_t>>& schedule() const noexcept {
    return current_.batches;
  }
  /// The lock has been left after so many batches.
  void note_left(std::uint64_t batches_run);

 private:
  struct Step {
    std::vector<std::vector<std::uint32_t>> batches = {};
    std::vector<std::uint32_t> slots = {};
  };
  bool learnable(const wire::Plan&, const ResponseCache&) const;
  static bool repeats_itself(const wire::Batch&);
  bool in_current(std::uint32_t slot) const noexcept { return slot < seen_.size() && seen_[slot]; }
  void add(const wire::Batch&);
  void begin_step();
  void forget();
  void close_step();
  static std::vector<std::uint32_t> sorted(std::vector<std::uint32_t>);

  Step current_;
  std::vector<bool> seen_;               // by slot: is in the current step
  std::vector<std::uint32_t> previous_;  // slots, ascending
  std::vector<std::uint32_t> locked_;    // slots of the schedule locked last, ascending
  std::size_t locked_batches_ = 0;
  std::uint64_t equal_steps_ = 0;  // before the current one, equal to `previous_`
  std::uint64_t patience_ = 0;     // equal steps to wait for after locks that did not last
};

}  // namespace hvd::control
