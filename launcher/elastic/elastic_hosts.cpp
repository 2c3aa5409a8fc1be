// The agents of an elastic job, and its end.
#include <sys/types.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "base/text.h"
#include "elastic/elastic_job.h"
#include "system/error.h"
#include "system/process.h"
#include "system/times.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;

/// The time that agents get to end after their connections were closed.
constexpr milliseconds kAgentPatience{2000};

}  // namespace

void ElasticJob::spawn_agents() {
  for (const std::size_t index : placement_.agents_due(time_now())) {
    Host& host = hosts_[index];
    const auto nanoseconds = [this](member::Limit limit) {
      return static_cast<long long>(deadlines_[limit].count());
    };
    host.connect_by = Clock::now() + milliseconds(whole_ms(options_.start_timeout_s));
    try {
      host.agent = spawner_.spawn(host.place,
                                  {.size = slots_,
                                   .ranks = host.place.ranks,
                                   .renewal = nanoseconds(member::Limit::kRenewal),
                                   .heartbeat = nanoseconds(member::Limit::kHeartbeat),
                                   .kill = nanoseconds(member::Limit::kKill)},
                                  agents_output_end_.get(), -1);
    } catch (const LaunchError& error) {
      if (!ran_) throw;
      output_.print_line(error.what());  // this host may have processes to spare later
      host.connect_by.reset();
      placement_.host_lost(index, time_now());
    }
  }
}

void ElasticJob::reap_agents() {
  std::erase_if(former_agents_, [](pid_t agent) { return try_wait(agent).has_value(); });
  for (Host& host : hosts_) {
    if (host.agent <= 0) continue;
    const auto end = try_wait(host.agent);
    if (!end) continue;
    host.agent = -1;
    // Where it is connected, the connection decides; a remote shell may end earlier.
    if (!host.connected && !ending_) agent_failed(host, *end);
  }
}

void ElasticJob::agent_failed(Host& host, const ExitStatus& end) {
  host.connect_by.reset();
  const auto index = static_cast<std::size_t>(&host - hosts_.data());
  placement_.host_lost(index, time_now());
  const std::string how = end.signal != 0 ? text("was ended by signal ", end.signal)
                                          : text("has ended with code ", end.code);
  const std::string who = host.place.local
                              ? "the agent of this host"
                              : text(plan_.remote_shell.front(), " to ", host.place.host);
  output_.print_line(text(who, " ", how, " before the agent has connected"));
  if (ran_ || placement_.reachable_slots() >= options_.np) return;
  begin_stop(static_cast<int>(ExitCode::kUnavailable), SIGTERM, options_.fail_grace_s,
             text("the job has not begun: without host ", host.place.host,
                  " there are fewer slots than -np ", options_.np,
                  "; check that the remote shell reaches it, and that hvdrun is installed there"));
}

void ElasticJob::on_hello(const Hello& hello, const std::string& address) {
  const std::size_t index = host_of(hello.seats.front().rank);
  Host& host = hosts_[index];
  host.connected = true;
  host.address = address;
  host.connect_by.reset();
  placement_.host_connected(index);
}

void ElasticJob::on_leaving(int slot) {
  if (ending_) return;
  const std::size_t host = host_of(slot);
  output_.print_line(text("host ", label(host), " leaves the job: its agent was asked to end"));
  placement_.refuse_host(host);
  coordinator_.host_leaves(label(host), time_now());
  carry_out();
}

void ElasticJob::on_disconnected(const std::vector<int>& slots) {
  host_down(host_of(slots.front()));
}

/// The connection to a host's agent has ended, or the coordinator has given the host up.
void ElasticJob::host_down(std::size_t index) {
  Host& host = hosts_[index];
  const TimePoint present = time_now();
  for (const int slot : host.place.ranks) {
    const auto found = workers_.find(slot);
    if (found == workers_.end()) continue;
    found->second.output->finish();
    if (!found->second.over && !ending_) placement_.lost(slot, found->second.id, present);
    workers_.erase(found);
  }
  host.connected = host.has_workers = false;
  server_.readmit(host.place.ranks);
  // Its agent and with it the workers end, if they are on this host.
  if (host.agent > 0) {
    ::kill(host.agent, SIGKILL);
    former_agents_.push_back(std::exchange(host.agent, -1));
  }
  placement_.host_lost(index, present);
  if (ending_) return;
  coordinator_.host_lost(host.place.host, present);
  carry_out();
}

void ElasticJob::begin_stop(int code, int signal, double grace_s, const std::string& reason) {
  if (std::exchange(ending_, true)) return;
  record_.code = code;
  record_.reason = reason;
  stop_workers(signal, whole_ms(grace_s));
  give_up_at_ = Clock::now() + milliseconds(whole_ms(grace_s)) + kLastReports;
}

void ElasticJob::stop_workers(int signal, int kill_after_ms) {
  for (const auto& [slot, worker] : workers_)
    server_.send(slot, {.signal = signal, .stop = true, .kill_after_ms = kill_after_ms});
}

/// Ends the agents, which end what is left of their workers.
void ElasticJob::end_agents() {
  closed_ = true;
  give_up_at_.reset();
  server_.close_all();
  for (const Host& host : hosts_)  // those that have not connected
    if (host.agent > 0 && !host.connected) ::kill(host.agent, SIGTERM);
  kill_at_ = Clock::now() + kAgentPatience;
  agents_output_end_.reset();
}

bool ElasticJob::over() const {
  return closed_ && former_agents_.empty() &&
         std::none_of(hosts_.begin(), hosts_.end(),
                      [](const Host& host) { return host.agent > 0; });
}

int ElasticJob::finish() {
  finishing_ = true;
  output_.write_files(hurried_);
  const std::string message = final_message(record_);
  if (options_.tag || !message.empty()) output_.console().finish_lines();
  output_.console().write(Stream::kStderr, Console::kNoOwner, message);
  output_.write_out(record_.code != 0, hurried_);
  if (record_.code == 0 && output_lost_) return static_cast<int>(ExitCode::kOutputLost);
  return record_.code;
}

}  // namespace hvd::launcher
