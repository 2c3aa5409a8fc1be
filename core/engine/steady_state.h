#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "engine/executor.h"
#include "engine/peers.h"
#include "engine/runtime_options.h"
#include "negotiation/dissemination_barrier.h"
#include "negotiation/messages.h"
#include "negotiation/schedule_replay.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// The replay of a schedule on one rank. Holds the schedule's batches, which every rank repeats
/// without a plan, as executions that wait for their operations, and the plans that are deferred
/// until the replay is over.
///
///   open --begin()--> repeating --advance(): kLeft, then release_waiting()--> open
///
/// control::ScheduleReplay decides which batch runs; control::DisseminationBarrier passes the
/// arrivals between hosts. begin() makes the executions, so that a step allocates no memory.
///
/// Not thread-safe: used by the thread that drives the engine. Errors of the transport and of a
/// backend are passed on as hvd::Error; the engine fails with them.
class SteadyState {
 public:
  using Outcome = control::ScheduleReplay::Outcome;

  /// The references outlive it.
  SteadyState(const RuntimeOptions&, control::ControlPlane&, Executor&, observe::Counters&);
  /// The replay of a process set. @param members its ranks, which are all on this host
  SteadyState(const RuntimeOptions&, control::ControlPlane&, Executor&, observe::Counters&,
              int process_set, std::vector<int> members);

  /// False when replays are switched off, or a host's ranks share no memory: then no schedule is
  /// ever replayed.
  bool available() const noexcept { return schedule_.available(); }
  bool repeating() const noexcept { return schedule_.replaying(); }
  std::size_t batches() const noexcept { return schedule_.batches(); }
  std::uint64_t position() const noexcept { return schedule_.position(); }
  /// Batches run since begin(), even after the replay was left.
  std::uint64_t batches_run() const noexcept { return schedule_.batches_run(); }

  /// Starts the replay of this schedule, which every rank repeats from now on. @pre !repeating(),
  /// and no operation of an earlier schedule waits
  void begin(std::vector<control::AgreedBundle> schedule, TimePoint now);
  /// Call this when an operation was submitted. If the schedule has no free place for it, this
  /// rank leaves. @return whether it now waits at a place in the schedule, which then has moved it.
  /// @pre repeating()
  bool offer(OperationPtr&, TimePoint now);
  /// Starts each batch for which every rank has all operations, or runs it if it is filled ahead.
  /// After kRun there may be more to do. After kLeft this rank has left: the caller calls
  /// release_waiting(), applies the plans of next_deferred_plan(), and calls this again.
  /// @param polls see ScheduleReplay::advance()
  Outcome advance(TimePoint now, bool polls);
  /// See ScheduleReplay::stop_polling().
  bool stop_polling() noexcept { return schedule_.stop_polling(); }
  /// Makes this rank leave at the next position at which it has not arrived yet.
  void leave_soon() noexcept { schedule_.leave_soon(); }
  /// Removes and returns the operations of batches that have not started, and drops the executions.
  std::vector<OperationPtr> release_waiting();
  std::vector<OperationPtr> waiting() const;
  bool anything_waits() const noexcept { return waiting_ > 0; }
  /// The executions of the schedule, by number of the batch.
  const std::vector<std::shared_ptr<Execution>>& executions() const noexcept { return executions_; }
  /// Whether operations wait in a schedule that spans hosts and has batches on a GPU. The host
  /// launches these when the ranks of all hosts have arrived. Other hosts cannot ring this rank's
  /// doorbell, and the GPU may be idle meanwhile.
  bool launch_awaits_other_hosts() const noexcept {
    return waiting_ > 0 && on_device_ && schedule_.spans_hosts();
  }

  /// Keeps a plan that arrived during the replay: rank 0 has left, and its update is still on its
  /// way. @throws hvd::Error on a single host, where the flags show that rank 0 has left before its
  /// plan can arrive
  void defer(const wire::Plan&);
  /// Removes and returns the next deferred plan; no value while a schedule is replayed.
  std::optional<wire::Plan> next_deferred_plan();

  /// Call this when a thread waits for an operation and no batch runs. @return whether this rank
  /// now leaves, because an operation of its own is missing
  bool leave_if_own_missing() noexcept;
  /// Call this regularly, and at deadline(). If no batch has run for a long time, this rank
  /// leaves, or requests that the ranks for which it waits leave, so that negotiation finds the
  /// missing ranks.
  /// @param waits whether this rank waits for others @return whether this rank now leaves
  bool watch(TimePoint now, bool waits);
  /// The time at which watch() has work if this rank waits.
  std::optional<TimePoint> deadline() const noexcept;

  /// On the first rank of each of several hosts: sends changes on this host to other hosts. To be
  /// called until it returns false. @return whether this host's ranks, this one included, have work
  bool exchange_updates();
  /// Handles an update of another host. exchange_updates() is to be called next. @throws hvd::Error
  /// when this rank is not the first of its host, or no host can send such an update
  void accept(int source, const wire::ReplayUpdate&);

 private:
  /// Fills the batch at whose position this rank arrives next, if it can be. @return false if it
  /// has to wait for its channel, and this rank must not arrive
  bool fill_ahead();
  /// Runs or starts the batch. @return the bytes of a batch that has run
  std::size_t run(std::size_t batch);
  /// Rings every other rank that repeats the schedule here.
  void ring_host() noexcept;
  void wake_next(bool first, bool left) noexcept;

  control::ControlPlane& control_;
  Executor& executor_;
  observe::Counters& counters_;
  const ControlSender sender_;
  const Duration idle_timeout_;
  /// The ranks of this host that repeat the schedule, ascending.
  const std::vector<int> host_;
  const std::size_t own_;  ///< this rank's position among them
  control::ScheduleReplay schedule_;
  std::optional<control::DisseminationBarrier>
      barrier_;  // on the first rank of each of several hosts
  // Local to exchange_updates(); keeps its memory.
  control::DisseminationBarrier::HostUpdates updates_;
  std::deque<wire::Plan> plans_;                        // deferred
  std::vector<std::shared_ptr<Execution>> executions_;  // by number of the batch, while repeating
  bool on_device_ = false;                              // some of them run on a GPU
  std::size_t waiting_ = 0;  // operations in executions that have not started
  TimePoint moved_at_{};     // when a batch last ran or an operation was last offered
};

}  // namespace hvd::runtime
