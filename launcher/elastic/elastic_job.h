#pragma once

#include <sys/types.h>

#include <asio/io_context.hpp>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "command/hosts.h"
#include "command/launch_plan.h"
#include "command/options.h"
#include "elastic/elastic_account.h"
#include "elastic/host_discovery.h"
#include "elastic/member_stream.h"
#include "elastic/placement.h"
#include "member/coordinator.h"
#include "processes/agent_spawner.h"
#include "processes/job_output.h"
#include "reports/rank_output.h"
#include "reports/report.h"
#include "reports/report_server.h"
#include "system/event_loop.h"
#include "system/process.h"
#include "system/socket.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// The deadlines of an elastic job, from the options and the ranks' variables.
member::Deadlines deadlines_of(const ElasticOptions& options, const LaunchPlan& plan);

/// One elastic job, from start to the last message. Carries the messages between its workers and
/// the coordinator (core/member), carries out the coordinator's decisions, and starts workers in
/// the slots that Placement selects. Not thread-safe: one thread, one loop.
///
/// Each host has slots, and each slot runs one worker after the other. The ReportServer treats
/// slots like the ranks of an ordinary job.
class ElasticJob final : private RankObserver {
 public:
  /// With --nnodes A:B this is the job on the endpoint's node, which the other nodes join.
  /// @throws PortTaken when the endpoint's port is served already, LaunchError.
  ElasticJob(const LaunchOptions& options, LaunchPlan plan);
  /// Returns hvdrun's exit code. @throws LaunchError when no agent can be started.
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  /// The time after the workers' grace period for which hvdrun still waits for reports.
  static constexpr std::chrono::milliseconds kLastReports{3000};

  struct Host {
    HostRanks place;       ///< its ranks are the numbers of its slots, including unused ones
    int slots = 0;         ///< the number of slots to use
    bool joins = false;    ///< its agent is not started from here
    bool leaving = false;  ///< its agent was asked to end, and is still connected
    bool unused = false;   ///< since then, until the host appears again
    pid_t agent = -1;
    std::optional<Deadline> connect_by = {};
    bool connected = false;
    int taken = 0;             ///< slots that its agent has
    int given = 0;             ///< slots that its agent has or was offered
    bool refuses = false;      ///< its agent cannot get more slots
    bool has_workers = false;  ///< a worker was reported to the coordinator
    std::string address = {};
  };
  /// A worker that runs or has output left.
  struct Worker {
    member::WorkerId id = 0;
    std::size_t host = 0;
    std::unique_ptr<RankOutput> output = {};
    MemberStream incoming = {};
    bool over = false;       ///< its end was reported to the coordinator
    bool refused = false;    ///< its program differs from the job's
    bool dismissed = false;  ///< the coordinator lets it end
    std::string cause = {};  ///< why hvdrun has killed it
    std::optional<Notice> death = {};
  };

  std::vector<int> on_join(const Hello& hello) override;
  void on_hello(const Hello& hello, const std::string& address) override;
  void on_started(int slot, const ProgramStarted& started) override;
  void on_notice(int slot, const Notice& notice) override;
  void on_rendezvous(int, const RendezvousBytes&) override {}
  void on_output(int slot, Stream stream, std::string_view bytes) override;
  void on_member(int slot, std::string_view bytes) override;
  void on_gone(int slot) override;
  void on_lease(int slot) override;
  void on_leaving(int slot) override;
  void on_ended(int slot, const Ended& ended) override;
  void on_drained(int slot) override;
  void on_lost(int) override {}
  void on_slots(int slot, const std::vector<int>& taken) override;
  void on_disconnected(const std::vector<int>& slots) override;

  void describe_deadlines();
  void after_events();
  void on_timers();
  void on_signal(int signal);
  void on_user_signal(int signal);
  std::optional<Deadline> next_deadline();

  // The coordinator.
  void run_coordinator();
  void carry_out();
  void deliver(const member::Deliver& deliver);
  void kill(const member::Kill& kill);
  void worker_over(Worker& worker, int slot, const std::string& cause);
  void on_outcome(member::Outcome outcome);
  void check_limits();

  // Workers and hosts.
  void spawn_agents();
  void reap_agents();
  void agent_failed(Host& host, const ExitStatus& end);
  void host_down(std::size_t host);
  void discover();
  void update_hosts(const std::vector<launcher::Host>& found);
  std::size_t index_of(const launcher::Host& found);
  void set_slots(std::size_t host, int slots);
  void use_slots(std::size_t host);
  void agent_gone(std::size_t host);
  void dismiss_agents();
  void start_worker(const Placement::Start& start);
  StartOrder order_for(std::size_t host, member::WorkerId id) const;
  Worker* find(int slot);
  std::size_t host_of(int slot) const { return host_of_slot_[static_cast<std::size_t>(slot)]; }
  const std::string& label(std::size_t host) const { return hosts_[host].place.host; }

  // The end.
  void begin_stop(int code, int signal, double grace_s, const std::string& reason);
  void stop_workers(int signal, int kill_after_ms);
  void end_agents();
  bool over() const;
  LostWorker* lost_record(member::WorkerId id);
  int finish();

  const LaunchOptions options_;
  LaunchPlan plan_;
  const member::Deadlines deadlines_;
  const std::string id_ = random_token();  ///< unique to this start
  int slots_;                              ///< of all hosts
  asio::io_context io_{1};
  Alarm alarm_{io_};
  JobOutput output_;
  std::vector<Host> hosts_;
  std::vector<std::size_t> host_of_slot_;
  std::map<std::string, std::size_t> host_of_name_;
  std::optional<HostDiscovery> discovery_;  ///< empty: the hosts are fixed
  std::string discovery_problem_;           ///< of the last run
  ReportServer server_;
  AgentSpawner spawner_;
  std::optional<PipeReader> agents_output_;
  UniqueFd agents_output_end_;
  std::optional<SignalReader> signals_;
  Placement placement_;
  member::Coordinator coordinator_;
  std::map<int, Worker> workers_;  ///< by slot
  std::map<member::WorkerId, int> slot_of_;
  std::vector<pid_t> former_agents_;  ///< of connections that have ended, until they are reaped
  member::WorkerId last_id_ = 0;
  std::size_t losses_seen_ = 0;
  ElasticRecord record_;
  bool ran_ = false;       ///< a generation has run
  bool complete_ = false;  ///< the program has ended on all members
  bool ending_ = false;    ///< no more workers are started
  bool closed_ = false;    ///< the agents are to end
  bool finishing_ = false, hurried_ = false, output_lost_ = false;
  int user_signal_ = 0;
  Deadline user_signal_at_{};
  std::optional<Deadline> timeout_at_, kill_at_, give_up_at_;
};

}  // namespace hvd::launcher
