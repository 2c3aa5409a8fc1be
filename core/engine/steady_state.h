#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "engine/peers.h"
#include "engine/executor.h"
#include "engine/runtime_options.h"
#include "negotiation/dissemination_barrier.h"
#include "negotiation/messages.h"
#include "negotiation/schedule_replay.h"
#include "transport/control_plane.h"

namespace hvd::runtime {

/// One rank's steady state: the batches of a schedule, which every rank repeats without a plan, as
/// executions that wait for their operations; and the plans that wait until it is over.
///
///   open --begin()--> repeating --advance(): kLeft, then take_waiting()--> open
///
/// What decides which batch runs is control::ScheduleReplay, and between hosts
/// control::DisseminationBarrier. The executions are made when it begins, so that a step
/// allocates nothing.
///
/// Not thread-safe: the thread that drives the engine. Errors of the transport and of a backend go
/// through as hvd::Error; the engine ends with them.
class SteadyState {
 public:
  using Outcome = control::ScheduleReplay::Outcome;

  /// All outlive it.
  SteadyState(const RuntimeOptions&, control::ControlPlane&, Executor&, observe::Counters&);

  /// False when it is switched off, or some host's ranks share no memory: nothing is ever repeated.
  bool available() const noexcept { return schedule_.available(); }
  bool repeating() const noexcept { return schedule_.replaying(); }
  /// In the schedule that is repeated.
  std::size_t batches() const noexcept { return schedule_.batches(); }
  /// Since begin(), also after it was left.
  std::uint64_t batches_run() const noexcept { return schedule_.batches_run(); }

  /// Every rank repeats this from now on. @pre !repeating(), and nothing waits from before
  void begin(std::vector<control::AgreedBundle> schedule, TimePoint now);
  /// An operation has come. If it is not what comes in this schedule, this rank leaves.
  /// @return whether it has its place, and waits there. @pre repeating()
  bool offer(const OperationPtr&, TimePoint now);
  /// Starts each batch for which every rank has all operations. kLeft: it has been left, whatever
  /// else happened; take_waiting() is to be called, and after the plans of take_plan() again this.
  Outcome advance(TimePoint now);
  /// This rank leaves at the next position at which it has not arrived.
  void leave_soon() noexcept { schedule_.leave_soon(); }
  /// What waits in batches that have not started; it does not any more, and there are no
  /// executions.
  std::vector<OperationPtr> take_waiting();
  /// The same, which go on waiting.
  std::vector<OperationPtr> waiting() const;
  bool anything_waits() const noexcept { return waiting_ > 0; }
  /// Operations wait in a schedule with batches on a GPU, which the host launches when the ranks of
  /// all hosts have arrived. Other hosts cannot ring, and the GPU may run idle meanwhile.
  bool launch_awaits_other_hosts() const noexcept {
    return waiting_ > 0 && on_device_ && schedule_.spans_hosts();
  }

  /// A plan has come while this rank repeats a schedule: who made it has left, of which news is on
  /// its way. @throws hvd::Error on a single host, where that shows before the plan can come
  void defer(const wire::Plan&);
  /// The next plan that was deferred, unless a schedule is repeated.
  std::optional<wire::Plan> take_plan();

  /// A thread waits for an operation, and nothing runs. @return whether this rank now leaves, as it
  /// waits for what it lacks itself
  bool note_blocked() noexcept;
  /// To be asked now and then, and at deadline(). Where nothing has moved for long this rank
  /// leaves, or asks those to leave that it waits for, so that negotiation finds out who is
  /// missing. @param waits for other ranks  @return whether it now leaves
  bool watch(TimePoint now, bool waits);
  /// When watch() has something to do, given that this rank waits.
  std::optional<TimePoint> deadline() const noexcept;

  /// Between hosts, by the first rank of each: tells other hosts what has changed here. To be
  /// called until it returns false. @return whether this host's ranks, this one included, have
  /// something to do
  bool exchange_updates();
  /// What another host tells. exchange_updates() is to be called next. @throws hvd::Error when this
  /// rank does not speak for its host, or no host can have such news
  void accept(int source, const wire::ReplayUpdate&);

 private:
  void run(std::size_t batch);
  /// Every other rank of this host.
  void ring_host() noexcept;
  void wake_next(bool first) noexcept;

  control::ControlPlane& control_;
  Executor& executor_;
  observe::Counters& counters_;
  const ControlSender sender_;
  const Duration patience_;
  const std::vector<int> host_;  ///< the ranks of this host, ascending
  const std::size_t own_;        ///< this rank's position among them
  control::ScheduleReplay schedule_;
  std::optional<control::DisseminationBarrier> barrier_;  // the first rank of each of several hosts
  std::vector<control::DisseminationBarrier::Send>
      updates_;                   // of one exchange_updates(), kept for its memory
  std::deque<wire::Plan> plans_;  // deferred
  std::vector<std::shared_ptr<Execution>> executions_;  // by number of the batch, while repeating
  bool on_device_ = false;   // some of them run on a GPU
  std::size_t waiting_ = 0;  // operations in executions that have not started
  TimePoint moved_at_{};     // a batch last ran or an operation last came
};

}  // namespace hvd::runtime
