#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/cache_line.h"
#include "negotiation/messages.h"
#include "negotiation/negotiator.h"
#include "negotiation/process_set_table.h"

namespace hvd::control {

/// The position of an operation in a replayed schedule. The operation's owner keeps it, so that it
/// is found again without a search.
struct SchedulePlace {
  std::uint64_t replay = 0;  ///< number of the replay, from 1; 0: in no replay
  std::uint32_t batch = 0;
  std::uint32_t index = 0;
};

/// Whether the operation is a join or a change of the process sets, which change state that all
/// ranks share. A rank leaves all its replays before it reports such an operation.
bool ends_all_replays(const wire::Request&) noexcept;

/// Whether a rank withdraws this unplanned operation when it enters a replay of the set; the
/// coordinator then ignores the operation in earlier reports. A replay of all ranks withdraws every
/// operation.
bool withdrawn_by_replay(const wire::Request&, int process_set) noexcept;

/// Whether a schedule of the set may contain the operation. Batches of several sets on a GPU must
/// run in one order on all ranks, so only the set of all ranks has replays there.
bool can_be_replayed(const wire::Request&, int process_set) noexcept;

/// Whether the set may be replayed, because no other existing set uses the same flag. The flag of a
/// removed set can be reused: no rank reads it any more, and its positions are lower.
bool may_replay(const ProcessSetTable&, int process_set);

/// One rank's side of the steady state, in which the members of a process set repeat batches that
/// they have agreed on before, without negotiating again. Below, "all ranks" means these members.
///
/// A schedule is a sequence of bundles. A bundle is one batch, or several batches that hold the
/// members of a group. Positions count bundles, from 1, across all replays of a job. At each
/// position a rank arrives: ready, when all operations of the bundle were submitted; or leaving,
/// when it has an operation outside the schedule, or another rank requests it. No rank touches the
/// data of a position before every rank has arrived there ready. If one rank arrives leaving, all
/// ranks leave at that position, which no rank can have passed, and negotiate the operations that
/// they had offered as usual. Every rank therefore runs the same whole bundles, and no operation is
/// lost or run twice. See docs/decisions/0010-schedule-replay.md.
///
///   open --enter()--> replaying --a rank arrives leaving--> open
///
/// Not thread-safe: only the thread that drives the engine calls it.
class ScheduleReplay {
 public:
  enum class Outcome { kNothing, kRun, kLeft };
  struct NextBundle {
    Outcome outcome = Outcome::kNothing;
    std::size_t batch = 0;    ///< kRun: the first batch of the bundle that all ranks run now
    std::size_t batches = 0;  ///< kRun: the number of batches of the bundle
    bool ring = false;        ///< the caller must wake the other ranks
  };

  /// @param flags one for each rank of this host; empty: replay is not available
  /// @param own position of this rank's flags in `flags`
  /// @param remote the flags of all other hosts together, as DisseminationBarrier writes them; null
  /// when there are no other hosts
  /// @param process_set the set whose operations are replayed, see may_replay()
  ScheduleReplay(std::vector<ArrivalFlags*> flags, std::size_t own,
                 const ArrivalFlags* remote = nullptr, int process_set = 0)
      : flags_(std::move(flags)),
        own_(own),
        remote_(remote),
        position_(static_cast<std::uint64_t>(process_set) << kPositionBits) {}

  bool available() const noexcept { return !flags_.empty(); }
  bool spans_hosts() const noexcept { return remote_ != nullptr; }
  bool replaying() const noexcept { return replaying_; }
  /// Starts a replay of these bundles. If all operations are in sequence, they are offered in this
  /// order, and an operation may occur several times. @pre !replaying()
  void enter(std::vector<AgreedBundle> schedule);
  /// Call this when an operation was submitted. If it is not in the schedule, or was already
  /// offered, this rank leaves.
  /// @param known the place that an earlier call stored for an equal request; this call updates it
  /// @return whether it now waits at a place in the schedule
  bool offer(const wire::Request&, SchedulePlace& known);
  /// Whether the schedule contains the operation, offered or not. For `known`, see offer().
  bool find(const wire::Request&, SchedulePlace& known) const;
  /// Makes this rank leave at the next position at which it has not arrived.
  void leave_soon() noexcept { leaving_ = true; }
  /// Whether this rank has not offered all operations of the current bundle.
  bool lacks_own() const noexcept { return replaying_ && !arrived_; }
  /// The batch whose operations were all offered, and at whose position advance() arrives next; no
  /// value if the bundle there has several batches, or if this rank leaves.
  std::optional<std::size_t> arrives_with() const noexcept;
  /// Advances by at most one bundle; call it again until the outcome is kNothing. @param polls
  /// whether this thread calls it repeatedly until it calls stop_polling(), so that the other ranks
  /// need not wake it
  NextBundle advance(bool polls = false);
  /// Call this before this rank stops calling advance() while operations wait. @return whether the
  /// other ranks may have relied on these calls, in which case advance() has to be called once more
  bool stop_polling() noexcept;
  /// Whether another rank of this host, at this place in `flags`, has to be woken to see that all
  /// ranks have arrived at the position before the current one.
  bool has_to_be_woken(std::size_t rank) const noexcept {
    return flags_[rank]->polled.load(std::memory_order_seq_cst) + 1 < position_;
  }
  /// Requests that the other ranks leave, because this rank has arrived and they have not. The
  /// caller must wake them.
  void request_leave() noexcept;
  /// The number of batches run in this replay or, after it was left, in the last one.
  std::uint64_t batches_run() const noexcept { return batches_run_; }
  std::size_t batches() const noexcept { return batches_.size(); }
  /// The number of positions that this rank has passed, in all replays.
  std::uint64_t position() const noexcept { return position_; }
  const AgreedBatch& batch(std::size_t number) const noexcept { return batches_[number].agreed; }

 private:
  /// Sets with the same flag begin at positions that are at least 2^46 apart, because their numbers
  /// differ by a multiple of kArrivalFlags.
  static constexpr int kPositionBits = 40;
  struct ReplayedBatch {
    AgreedBatch agreed = {};
    std::vector<std::uint8_t> offered = {};
    std::size_t bundle = 0;
  };
  struct Bundle {
    std::size_t first = 0;  // of its batches
    std::size_t batches = 0;
    std::size_t operations = 0;
    std::size_t missing = 0;  // operations that have not been offered
  };
  void add(AgreedBatch);
  bool find_unnamed(const wire::Request&, SchedulePlace&) const;
  const wire::Request& planned(const SchedulePlace&) const noexcept;
  bool splits_unnamed_group(const wire::Request&, const SchedulePlace&) noexcept;
  void arrive(bool leaving, bool polls) noexcept;
  bool leave_requested() const noexcept;

  const std::vector<ArrivalFlags*> flags_;
  const std::size_t own_;
  const ArrivalFlags* const remote_;
  bool replaying_ = false;
  bool arrived_ = false;
  bool leaving_ = false;
  std::uint64_t position_;
  std::uint64_t batches_run_ = 0;
  std::size_t head_ = 0;  // the bundle at position_
  std::vector<Bundle> bundles_;
  std::vector<ReplayedBatch> batches_;      // of all bundles, in order
  std::size_t bundle_of_first_member_ = 0;  // of the unnamed group that was offered last
  std::uint64_t replays_ = 0;               // entered so far
  std::unordered_map<std::string, SchedulePlace> places_;  // by name
  std::vector<SchedulePlace> unnamed_places_;
  bool in_order_ = false;          // all operations are in sequence, and offered in this order
  std::size_t next_in_order_ = 0;  // index into `unnamed_places_`
};

/// Decides for the coordinator when to start a replay. A schedule consists of the batches that were
/// planned between two uses of the same name.
///
/// A replay starts after two equal steps, or after four if they were fused into different numbers
/// of batches, which depends on timing. It starts after one step that equals the schedule that was
/// replayed last. The replay repeats the step with the fewest batches among the equal ones. When
/// replays end early, each later one needs more equal steps, and repeats the latest step, because
/// the program may need the larger number of batches.
///
/// Batches that share a group form a bundle. If a replay were left inside a bundle, the members
/// that have run would have to wait for those that have not.
class StepLearner {
 public:
  /// @param process_set the set whose operations it learns. Operations in sequence are left to the
  /// SequenceLearner, except in the set of all ranks if other operations occur too
  explicit StepLearner(int process_set = 0) noexcept : set_(process_set) {}
  /// @return whether the plan completes a step after which to start a replay
  bool observe(const wire::Plan&, const ResponseCache&);
  /// The schedule to repeat, by cache slot.
  const std::vector<wire::SlotBundle>& schedule() const noexcept { return schedule_.bundles; }
  /// Call this when the replay has been left after this many batches.
  void end_replay(std::uint64_t batches_run);

 private:
  struct Step {
    std::vector<wire::SlotBundle> bundles = {};
    std::vector<std::uint32_t> slots = {};
    std::size_t batches = 0;
  };
  bool learnable(const wire::Plan&, const ResponseCache&) const;
  static bool repeats_itself(const wire::SlotBundle&);
  bool in_current(std::uint32_t slot) const noexcept { return slot < seen_.size() && seen_[slot]; }
  void add(wire::SlotBundle);
  std::uint64_t steps_wanted(bool known, bool again) const noexcept;
  void choose(bool known, bool again);
  void begin_step();
  void forget();
  void close_step();
  static std::vector<std::uint32_t> sorted(std::vector<std::uint32_t>);

  int set_;
  Step current_;
  std::vector<bool> seen_;                    // by slot: is in the current step
  std::vector<std::uint32_t> previous_;       // slots, ascending
  Step best_;                                 // of the steps equal to `previous_`
  bool vary_ = false;                         // those steps have different numbers of batches
  std::vector<std::uint32_t> last_schedule_;  // slots of the schedule replayed last, ascending
  Step schedule_;                             // that was replayed last
  bool schedule_holds_ = false;               // its slots still hold the same responses
  std::uint64_t equal_steps_ = 0;             // steps before the current one that equal `previous_`
  std::uint64_t backoff_ = 0;  // equal steps to wait for after replays that did not last
};

}  // namespace hvd::control
