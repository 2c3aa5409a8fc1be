#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "member/deadlines.h"
#include "member/messages.h"
#include "member/regroup.h"

namespace hvd::member {

struct CoordinatorOptions {
  int start_size = 1;                  ///< ranks of the first generation (-np)
  int min_np = 1;                      ///< --min-np
  int max_np = 1 << 20;                ///< --max-np; further workers wait as spares
  std::optional<int> max_resets = {};  ///< --reset-limit
  int max_failures = 0;                ///< --failure-limit; 0: no limit
  Deadlines deadlines = Deadlines();
};

// Actions for hvdrun to carry out.

struct Deliver {
  WorkerId to = 0;
  ToWorker message = {};
};
/// End the process at once. Call worker_ended() when it is known not to run any more.
struct Kill {
  WorkerId worker = 0;
  std::string cause = {};
};
using CoordinatorAction = std::variant<Deliver, Kill>;

/// How a job has ended.
enum class Outcome : std::uint8_t {
  kComplete,   ///< the program has ended on all members
  kTooFew,     ///< fewer than `min_np` ranks for the deadline `elastic`
  kStateLost,  ///< no worker has a state, and rank 0 cannot load one
  kTooManyResets,
  kFailsAgain,  ///< exceptions in a row at the same or an earlier commit
};

/// A worker that the job has lost.
struct Loss {
  WorkerId worker = 0;
  Generation generation = 0;  ///< the generation of which it was a member; 0: none
  std::string cause = {};
};

/// Decides the membership of a job, in hvdrun: which workers are the ranks of the next generation,
/// and whose state they receive. It neither starts processes nor chooses hosts.
///
/// Every call takes the current time, which never decreases. The caller passes the messages that
/// have arrived before it calls check(), and calls check() no later than next_check(). Then it
/// carries out take_actions(), in order. Pure, not thread-safe.
class Coordinator {
 public:
  enum class Phase : std::uint8_t {
    kCollecting,  ///< until all members have left the generation and the lost ones have ended
    kForming,     ///< until all members have the state
    kRunning,
    kEnded,
  };

  Coordinator(CoordinatorOptions, TimePoint now);

  /// Records that a process was started on a host.
  void worker_started(WorkerId, const std::string& host, TimePoint now);
  /// Records that the process does not run any more.
  void worker_ended(WorkerId, const std::string& cause, TimePoint now);
  void receive(WorkerId, const ToCoordinator&, TimePoint now);
  /// Records that the host's agent has requested a renewal of its lease.
  void host_reported(const std::string& host, TimePoint now);
  /// Records that the connection to the host's agent has ended.
  void host_lost(const std::string& host, TimePoint now);
  /// Requests that the host leaves the job in order.
  void host_leaves(const std::string& host, TimePoint now);
  /// Requests that the worker leaves the job in order, or cancels the request (`leaves` is false).
  void worker_leaves(WorkerId, bool leaves, TimePoint now);
  /// Acts on deadlines that have passed.
  void check(TimePoint now);
  TimePoint next_check(TimePoint now) const;

  std::vector<CoordinatorAction> take_actions();
  std::optional<Outcome> outcome() const noexcept { return outcome_; }
  Phase phase() const noexcept { return phase_; }
  /// Whether the host has or had workers and was not lost since then.
  bool has_host(const std::string& host) const { return hosts_.contains(host); }
  /// The generation that is to be formed, is being formed or runs.
  Generation generation() const noexcept { return wanted_; }
  /// How many generations had begun to run and were then reset or changed.
  int resets() const noexcept { return resets_; }
  const std::vector<Loss>& losses() const noexcept { return losses_; }
  /// The last exception of a job that has ended with kFailsAgain, with its rank, worker and commit.
  const std::string& failure() const noexcept { return failure_; }
  /// Sentences for the user since the last call.
  std::vector<std::string> take_notes();

 private:
  enum class WorkerState : std::uint8_t {
    kStarting,   ///< has not joined
    kCandidate,  ///< has joined, but is not a member
    kMember,
    kLost,       ///< was a member, and may still run
    kDismissed,  ///< is to end by itself, or was lost without having been a member
  };
  struct Worker {
    std::string host = {};
    WorkerState status = WorkerState::kStarting;
    std::uint64_t serial = 0;     ///< orders the members; 0: never was one
    TimePoint since = {};         ///< of its status
    TimePoint last_message = {};  ///< last message, or the first ping after a quiet time
    TimePoint pinged = {};
    bool watched = false;               ///< pings are being sent to it
    Generation asked = 0;               ///< the last reset that was sent to it
    std::optional<Ready> ready = {};    ///< for the wanted generation
    std::optional<Synced> synced = {};  ///< in the wanted generation
    std::optional<Commit> begun = {};   ///< reported for the change that is being prepared
    bool at_end = false;
    bool leaving = false;  ///< in order
    bool late = false;     ///< has not answered the last reset in time
  };
  struct Host {
    TimePoint last_message = {};
    bool leaving = false;
  };
  /// A change in order, from Prepare until the members are ready.
  struct Change {
    std::uint64_t number = 0;
    TimePoint since = {};
    std::optional<Target> target = {};
  };
  using Workers = std::map<WorkerId, Worker>;

  void handle(WorkerId, Worker&, const Join&, TimePoint);
  void handle(WorkerId, Worker&, const Ready&, TimePoint);
  void handle(WorkerId, Worker&, const Synced&, TimePoint);
  void handle(WorkerId, Worker&, const Failed&, TimePoint);
  void handle(WorkerId, Worker&, const AtEnd&, TimePoint);
  void handle(WorkerId, Worker&, const Begun&, TimePoint);
  void handle(WorkerId, Worker&, const Pong&, TimePoint) {}
  void handle(WorkerId, Worker&, const ProgramFailed&, TimePoint);

  // Losses.
  void lose(WorkerId, const std::string& cause, TimePoint now);
  /// Records the loss of a worker, and returns whether it is a member.
  bool record_loss(WorkerId, Worker&, const std::string& cause);
  void drop_host(const std::string& host, const std::string& cause, TimePoint now);

  // Generations.
  void reset(const std::string& cause, TimePoint now);
  void ask(WorkerId, Worker&, const std::string& cause);
  void clear_answers();
  void try_assign(TimePoint now);
  bool may_form(TimePoint now);
  bool enough(int ready, TimePoint now) const;
  bool fence_passed(TimePoint now) const;
  std::vector<Entrant> entrants() const;
  bool divided() const;
  bool may_leave(WorkerId, const Worker&) const;
  void dismiss_leavers();
  void assign(Regroup, TimePoint now);
  void try_go(TimePoint now);
  void try_complete();
  void finish(Outcome);

  // Changes in order.
  void consider_change(TimePoint now);
  void dismiss_candidates();
  void begin_change(TimePoint now);
  void try_target(TimePoint now);
  std::vector<WorkerId> named_to_leave() const;

  // Deadlines.
  /// Takes the current time. Time in which hvdrun itself did not run does not count for any
  /// deadline.
  void enter(TimePoint now);
  void check_silence(TimePoint now);
  void check_hosts(TimePoint now);
  void check_fences(TimePoint now);
  void check_starts(TimePoint now);
  void check_stalls(TimePoint now);
  void check_collecting(TimePoint now);
  bool needs_answer(const Worker&) const;

  void send(WorkerId to, ToWorker message) {
    actions_.emplace_back(Deliver{to, std::move(message)});
  }
  int count(WorkerState) const;
  bool is_leaving(const Worker&) const;
  std::vector<WorkerId> members_that(const std::function<bool(const Worker&)>&) const;
  /// The generation that the members are in while no reset is under way, else 0.
  Generation present() const;
  Duration limit(Limit which) const { return options_.deadlines[which]; }

  const CoordinatorOptions options_;
  Phase phase_ = Phase::kCollecting;
  Generation wanted_ = 1;
  Generation running_ = 0;  ///< the last generation that has run
  bool in_order_ = false;   ///< collecting for a change in order: the generation still runs
  TimePoint since_;         ///< of the phase, or of the lack of ranks
  TimePoint last_;          ///< the last time that was given
  std::optional<TimePoint> complete_since_ = {};  ///< survivors wait for candidates only
  std::optional<TimePoint> window_ = {};          ///< a candidate waits for admission
  std::optional<Change> change_ = {};
  std::uint64_t changes_ = 0;
  Assign assigned_ = {};
  /// Workers that leave after they have sent their state to the others.
  std::set<WorkerId> departing_state_sources_ = {};
  std::string program_ = {};
  std::uint64_t serials_ = 0;
  int resets_ = 0;
  int failures_ = 0;          ///< generations in a row in which the program has thrown
  Generation failed_in_ = 0;  ///< the last one of them
  Commit failed_at_ = 0;      ///< the highest commit at which they were thrown
  std::string failure_ = {};
  Workers workers_;
  std::map<std::string, Host> hosts_;
  std::map<std::string, TimePoint> cut_off_;  ///< until when processes of lost hosts may run
  std::vector<Loss> losses_;
  std::vector<CoordinatorAction> actions_;
  std::vector<std::string> notes_;
  std::optional<Outcome> outcome_;
};

}  // namespace hvd::member
