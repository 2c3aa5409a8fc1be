#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "member/coordinator.h"
#include "member/lease.h"
#include "member/member.h"
#include "support/seeds.h"

/// An elastic job in virtual time: hvdrun's coordinator, hosts with an agent each, processes that
/// step together over a network with generations, and faults drawn from a seed.
namespace hvd::member::testing {

using hvd::testing::Random;

/// The replicated state of a process.
struct Model {
  std::uint64_t history = 0;  ///< counts the states that were made from nothing
  StateSummary summary = {};  ///< its hash stands for the content
};

struct MemberScenario {
  int hosts = 1;
  int per_host = 3;
  int start = 3;
  int min_np = 1;
  int max_np = 8;
  int steps = 10;
  int faults = 4;
  bool can_load = true;
  bool replaces = true;  ///< lost processes are started again
  bool divided = false;  ///< each rank has a part of the state
};

/// How often each situation occurred, over all seeds.
using Coverage = std::map<std::string, int>;

class MemberWorld {
 public:
  MemberWorld(std::uint64_t seed, Coverage&);
  /// Runs the job to its end. Returns what went wrong; empty if all is well.
  std::vector<std::string> run();
  std::string described() const;

 private:
  struct Host {
    std::string name = {};
    bool alive = true;
    bool cut = false;           ///< from hvdrun
    bool disconnected = false;  ///< hvdrun has lost the connection to its agent
    bool isolated = false;      ///< also from the other hosts
    bool leaves = false;
    bool disturbed = false;  ///< for so long that its processes may be lost
    Lease lease;
    std::vector<std::function<void()>> held = {};  ///< messages while it is cut
    TimePoint last_up = {}, last_down = {};        ///< messages arrive in order
  };
  struct Process {
    WorkerId id = 0;
    std::size_t host = 0;
    Member member;
    Model model = {};
    bool alive = true;
    bool stopped = false;
    bool disturbed = false;
    bool slow = false;     ///< leaves slowly
    Duration rest = {};    ///< how much longer its next step takes
    bool over = false;     ///< has returned from run()
    bool inside = false;   ///< in the program's function
    bool waits = false;    ///< for contributions
    bool partial = false;  ///< its state is being overwritten, or that was interrupted
    bool committing = false;
    int late_commits = 0;     ///< after a later generation began
    std::uint64_t epoch = 0;  ///< a change makes pending work void
    Assign assign = {};
    std::uint32_t rank = 0;
    TimePoint waits_since = {};
    std::vector<std::function<void()>> held = {};  ///< events while it is stopped
    /// By generation and step: contributions by rank.
    std::map<std::pair<Generation, Commit>, std::map<std::uint32_t, std::uint64_t>> received = {};
    std::map<std::pair<std::uint64_t, Commit>, std::uint64_t> committed = {};
  };
  struct Event {
    TimePoint time = {};
    std::uint64_t number = 0;
    std::function<void()> act = {};
    bool operator<(const Event& other) const {
      return std::tie(time, number) > std::tie(other.time, other.number);
    }
  };

  // Time and messages.
  void at(TimePoint, std::function<void()>);
  void after(Duration delay, std::function<void()> act) { at(now_ + delay, std::move(act)); }
  /// Does it in a process unless it has died; later if it is stopped.
  void in(WorkerId, std::function<void(Process&)>);
  /// The same after a time, unless the process has gone on to other work meanwhile.
  void work(Process&, Duration, std::function<void(Process&)>);
  Duration between(int min_us, int max_us) {
    return std::chrono::microseconds(min_us + random_.below(max_us - min_us + 1));
  }
  void up(std::size_t host, std::function<void()>);
  void down(std::size_t host, std::function<void()>);
  void carry(std::size_t host, TimePoint Host::*, std::function<void()>);
  void flush_coordinator();
  void flush(Process&);
  void tick();

  // Hosts and processes.
  void start(std::size_t host, bool spare);
  void kill(WorkerId);
  void agent_beats(std::size_t host);
  void replace(std::size_t host);
  void stop(Process&, Duration);
  void cut(Host&, Duration, bool isolates);
  bool reachable(const Process&, const Process&) const;

  // A process's work.
  void act(Process&, const Leave&);
  void act(Process&, const Form&);
  void act(Process&, const Run&);
  void act(Process&, const Wake&);
  void act(Process&, const Finish&);
  void act(Process&, const Exit&);
  void act(Process&, const Send&);
  void leave(Process&, bool forced);
  void break_connections(const Process&);
  void receive_state(Process&);
  void step(Process&);
  void contribute(Process&);
  void send(WorkerId from, WorkerId to, std::pair<Generation, Commit> step, std::uint32_t rank,
            std::uint64_t value);
  void try_step(Process&);
  void commit(Process&, Member::Verdict);
  bool fails_to_hand_on(const Process&) const;
  void watch_peers(Process&);
  void accuse_silent(Process&, const std::vector<std::uint32_t>& missing);

  // Faults.
  void plan_faults();
  void inject_fault();
  Process* pick_process(bool members_only);
  void inject_fault_at_a_phase(int which);
  void inject_host_fault(Host&, int kind);
  void inject_program_fault(Process&, int kind);
  void leave_in_order(std::size_t host);

  // Checks.
  void fail(const std::string&);
  void check_delivery(const Deliver&);
  void check_assign(const Assign&, WorkerId to);
  void check_end_of(WorkerId);
  void check_run(const Process&);
  void check_store(const Process&, Generation);
  void check_loss(const Kill&);
  void check_end();
  void cover(const std::string& what, bool when = true);

  std::uint64_t seed_;
  Random random_;
  Coverage& coverage_;
  MemberScenario scenario_;
  Deadlines deadlines_;
  TimePoint now_{std::chrono::seconds(1000)};
  std::uint64_t events_ = 0;
  std::priority_queue<Event> queue_;
  std::vector<Host> hosts_;
  std::map<WorkerId, Process> processes_;
  WorkerId last_id_ = 0;
  std::uint64_t histories_ = 0;
  std::optional<Coordinator> coordinator_;
  bool damaged_ = false;         ///< a process has another state than the others
  Generation in_order_ = 0;      ///< the generation that a change in order leads to
  std::vector<WorkerId> named_;  ///< the members that leave it in order
  std::optional<Target> fails_;  ///< the commit of this change fails on all ranks
  std::set<std::pair<std::size_t, std::size_t>> broken_;  ///< hosts that cannot reach each other
  std::set<WorkerId> members_;                            ///< of the generation assigned last
  std::set<WorkerId> leaving_;                            ///< in order
  /// Commits (history, number) of which all had written parameters: one state was given to all.
  std::set<std::pair<std::uint64_t, Commit>> touched_;
  std::map<Generation, Model> starts_;
  std::vector<std::string> faults_;
};

}  // namespace hvd::member::testing
