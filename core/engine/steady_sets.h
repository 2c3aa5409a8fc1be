#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/steady_state.h"

namespace hvd::runtime {

/// The replays of one rank: one for the set of all ranks and, in a job on one host, one for each
/// process set of this rank. They begin and end independently of each other, see
/// docs/decisions/0049-each-set-replays-by-itself.md.
///
/// An operation waits in the replay of its set if it has a place there. An operation without a
/// place makes this rank leave, and is held until it has left:
///
/// | operation | held while it repeats |
/// | --- | --- |
/// | of a set | the schedule of that set |
/// | of a set, on a GPU | also that of all ranks: batches on a GPU run in one order |
/// | join, change of process sets; any operation in a job of several hosts | any schedule |
///
/// Not thread-safe: used by the thread that drives the engine. Errors of the transport and of a
/// backend are passed on as hvd::Error; the engine fails with them.
class SteadySets {
 public:
  /// The references outlive it.
  SteadySets(const RuntimeOptions&, control::ControlPlane&, Executor&, observe::Counters&);

  /// See SteadyState.
  bool available() const noexcept { return world_.available(); }
  /// Whether any schedule is repeated.
  bool repeating() const noexcept;
  bool repeating(int process_set) const noexcept;
  /// Whether this rank does not negotiate because it repeats the schedule of all ranks.
  bool excludes_negotiation() const noexcept { return spans_hosts_ && world_.repeating(); }
  /// The number of batches in all schedules that are repeated.
  std::size_t batches() const noexcept;
  /// See SteadyState::batches_run().
  std::uint64_t batches_run(int process_set) const;
  /// See SteadyState::position(); 0 before the set's first replay.
  std::uint64_t position(int process_set) const noexcept;

  /// Starts the replay of this schedule. @param members the ranks of the set
  /// @throws hvd::Error when the set already repeats one, or its ranks are not all on this host
  void begin(int process_set, const std::vector<int>& members,
             std::vector<control::AgreedBundle> schedule, TimePoint now);
  /// Call this when an operation was submitted. @return whether it waits for a replay, which
  /// then has moved it; otherwise the caller negotiates it
  bool accept(OperationPtr&, TimePoint now);
  struct Advanced {
    bool moved = false;
    std::optional<int> left = {};  ///< this set's replay, if one has been left
  };
  /// Starts each batch for which every rank has all operations. When a replay has been left, the
  /// caller calls release() and then this again.
  /// @param polls see control::ScheduleReplay::advance()
  Advanced advance(TimePoint now, bool polls);
  /// See control::ScheduleReplay::stop_polling().
  bool stop_polling() noexcept;
  /// Removes and returns, in the order of their submission, the operations to negotiate now that
  /// the set's replay has been left.
  std::vector<OperationPtr> release(int process_set);
  /// Removes all operations that wait. Call this after a failure.
  void release_all();
  /// Makes this rank leave all replays.
  void leave_soon() noexcept;
  /// Call this when the process set was removed, after its replay has been left.
  void remove(int process_set);
  /// The operations that wait for replays.
  std::vector<OperationPtr> waiting() const;
  bool anything_waits() const noexcept;
  bool launch_awaits_other_hosts() const noexcept { return world_.launch_awaits_other_hosts(); }

  void defer(const wire::Plan& plan) { world_.defer(plan); }
  std::optional<wire::Plan> next_deferred_plan() { return world_.next_deferred_plan(); }

  /// See SteadyState; applies to all replays in which operations wait.
  bool leave_if_own_missing() noexcept;
  bool watch(TimePoint now, bool waits);
  std::optional<TimePoint> deadline() const noexcept;
  bool exchange_updates() { return world_.exchange_updates(); }
  void accept(int source, const wire::ReplayUpdate& update) { world_.accept(source, update); }

 private:
  enum class Holds : std::uint8_t { kOwnSet, kOwnSetAndWorld, kAll };
  Holds holds(const wire::Request&) const noexcept;
  /// Whether the operation has to wait until this rank has left a replay.
  bool is_held(const wire::Request&) const noexcept;
  SteadyState* find(int process_set) noexcept;
  const SteadyState* find(int process_set) const noexcept;
  template <class Visit>
  void for_each(Visit&& visit);
  template <class Visit>
  void for_each(Visit&& visit) const;

  const RuntimeOptions options_;
  control::ControlPlane& control_;
  Executor& executor_;
  observe::Counters& counters_;
  const bool spans_hosts_;
  SteadyState world_;
  std::map<int, std::unique_ptr<SteadyState>> sets_;  // without the set of all ranks
  std::map<std::uint64_t, OperationPtr> held_;        // by OperationState::order
  bool holds_all_ = false;  // a held operation waits until no schedule repeats
};

}  // namespace hvd::runtime
