// The hosts of an elastic job, their agents, and its end.
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

/// Time for agents to end after their connections were closed.
constexpr milliseconds kAgentGrace{2000};

std::vector<int> first_slots(const std::vector<int>& slots, int count) {
  return {slots.begin(), slots.begin() + count};
}

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
                                   .ranks = first_slots(host.place.ranks, host.slots),
                                   .renewal = nanoseconds(member::Limit::kRenewal),
                                   .heartbeat = nanoseconds(member::Limit::kHeartbeat),
                                   .kill = nanoseconds(member::Limit::kKill)},
                                  agents_output_end_.get(), -1);
    } catch (const LaunchError& error) {
      if (!ran_) throw;
      output_.print_line(error.what());  // this host may be able to start processes later
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
    // If the agent is connected, only the connection counts; a remote shell may end earlier.
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
  if (ran_ || discovery_ || placement_.reachable_slots() >= options_.np) return;
  begin_stop(static_cast<int>(ExitCode::kUnavailable), SIGTERM, options_.fail_grace_s,
             text("the job has not begun: without host ", host.place.host,
                  " there are fewer slots than -np ", options_.np,
                  "; check that the remote shell reaches it, and that hvdrun is installed there"));
}

std::vector<int> ElasticJob::on_join(const Hello& hello) {
  if (!options_.node || ending_ || hello.slots > kMaxSlotsPerHost) return {};
  // Several nodes may be one host. A node that has left and joins again gets its former entry.
  const auto is_free = [this](const std::string& name) {
    return std::none_of(hosts_.begin(), hosts_.end(), [&](const Host& host) {
      return host.place.host == name && (!host.joins || host.connected);
    });
  };
  std::string name = hello.host;
  for (int number = 2; !is_free(name); ++number) name = text(hello.host, "#", number);
  const auto known = std::find_if(hosts_.begin(), hosts_.end(),
                                  [&](const Host& host) { return host.place.host == name; });
  const auto index = static_cast<std::size_t>(known - hosts_.begin());
  if (known == hosts_.end()) {
    hosts_.push_back({.place = {.host = name, .local = false, .ranks = {}}, .joins = true});
    placement_.add_host(0, time_now(), true);
  }
  set_slots(index, hello.slots);
  return first_slots(hosts_[index].place.ranks, hello.slots);
}

void ElasticJob::on_hello(const Hello& hello, const std::string& address) {
  const std::size_t index = host_of(hello.seats.front().rank);
  Host& host = hosts_[index];
  host.connected = true;
  host.address = address;
  host.connect_by.reset();
  host.taken = host.given = static_cast<int>(hello.seats.size());
  host.refuses = false;
  placement_.host_connected(index);
  use_slots(index);  // its number of slots may have grown since its agent was started
}

void ElasticJob::on_slots(int slot, const std::vector<int>& taken) {
  const std::size_t index = host_of(slot);
  Host& host = hosts_[index];
  host.refuses = taken.empty();
  host.taken = std::min(host.given, host.taken + static_cast<int>(taken.size()));
  use_slots(index);
}

void ElasticJob::on_leaving(int slot) {
  if (ending_) return;
  const std::size_t host = host_of(slot);
  output_.print_line(text("host ", label(host), " leaves the job: its agent was asked to end"));
  hosts_[host].leaving = hosts_[host].unused = true;
  placement_.refuse_host(host);
  use_slots(host);
  coordinator_.host_leaves(label(host), time_now());
  carry_out();
}

void ElasticJob::on_disconnected(const std::vector<int>& slots) {
  host_down(host_of(slots.front()));
}

/// Call this when the connection to a host's agent has ended, or the coordinator has given up
/// the host.
void ElasticJob::host_down(std::size_t index) {
  Host& host = hosts_[index];
  const TimePoint present = time_now();
  for (const int slot : host.place.ranks) {
    const auto found = workers_.find(slot);
    if (found == workers_.end()) continue;
    found->second.output->finish();
    const bool leaves = found->second.over || found->second.dismissed || host.joins;
    if (!leaves && !ending_) placement_.lost(slot, found->second.id, present);
    workers_.erase(found);
  }
  host.connected = host.has_workers = false;
  server_.readmit(host.place.ranks);
  // Ends the agent and with it the workers, if they are on this host.
  if (host.agent > 0) {
    ::kill(host.agent, SIGKILL);
    former_agents_.push_back(std::exchange(host.agent, -1));
  }
  placement_.host_lost(index, present);
  agent_gone(index);
  if (ending_) return;
  coordinator_.host_lost(host.place.host, present);
  carry_out();
}

/// Applies the output of the discovery script, if it has ended. While the script fails, the last
/// output remains valid.
void ElasticJob::discover() {
  if (!discovery_ || ending_) return;
  try {
    const auto found = discovery_->step(Clock::now());
    if (!found) return;
    discovery_problem_.clear();
    update_hosts(*found);
  } catch (const DiscoveryError& error) {
    if (std::exchange(discovery_problem_, error.what()) == error.what()) return;
    output_.print_line(text("--host-discovery-script: ", error.what(),
                            "; hvdrun keeps the hosts of the script's last valid output"));
  }
}

void ElasticJob::update_hosts(const std::vector<launcher::Host>& found) {
  std::map<std::size_t, int> slots;
  for (const launcher::Host& host : found) slots[index_of(host)] += host.slots;
  for (std::size_t host = 0; host < hosts_.size(); ++host) set_slots(host, slots[host]);
  carry_out();
}

/// The host of this name, which may be a new one without slots. All names of this machine that are
/// known without a look-up count as one host.
std::size_t ElasticJob::index_of(const launcher::Host& found) {
  const std::string target = shell_target(found);
  if (const auto known = host_of_name_.find(target); known != host_of_name_.end())
    return known->second;
  std::vector<launcher::Host> marked = {found};
  if (!found.local) {
    OwnNames own = own_names();
    own.resolve = [](const auto&) { return std::map<std::string, std::vector<std::string>>(); };
    mark_local_hosts(marked, own);
  }
  const auto same = std::find_if(hosts_.begin(), hosts_.end(), [&](const Host& host) {
    return host.place.host == target || (host.place.local && marked.front().local);
  });
  const auto index = static_cast<std::size_t>(same - hosts_.begin());
  if (same == hosts_.end()) {
    hosts_.push_back({.place = {.host = target, .local = marked.front().local, .ranks = {}}});
    placement_.add_host(0, time_now());
  }
  return host_of_name_[target] = index;
}

void ElasticJob::set_slots(std::size_t index, int slots) {
  Host& host = hosts_[index];
  const int before = std::exchange(host.slots, slots);
  if (before == slots) return;
  if (slots == 0) {
    output_.print_line(text("host ", label(index), " leaves the job: the script has removed it"));
  } else {
    output_.print_line(text("host ", label(index),
                            before == 0 ? " joins the job with " : " has now ", slots,
                            slots == 1 ? " slot" : " slots"));
  }
  if (before == 0) {
    host.unused = false;
    placement_.forget_failures(index, time_now());
  }
  use_slots(index);
}

/// Lets workers be started in the host's slots. Slots that its agent does not have yet are offered
/// to the agent, and used after its reply. An agent that was asked to end starts no workers.
void ElasticJob::use_slots(std::size_t index) {
  Host& host = hosts_[index];
  std::vector<int>& numbers = host.place.ranks;
  const int usable = host.leaving || host.unused ? 0 : host.slots;
  const int added = placement_.resize_host(index, usable);
  for (int i = 0; i < added; ++i) {
    numbers.push_back(slots_++);
    host_of_slot_.push_back(index);
  }
  server_.add_slots(added);
  if (host.connected) {
    if (usable > host.given && !host.refuses) {
      server_.give_slots(numbers.front(), {numbers.begin() + host.given, numbers.begin() + usable});
      host.given = usable;
    }
    placement_.resize_host(index, std::min(usable, host.taken));
  }
  for (const auto& [slot, worker] : workers_)
    if (worker.host == index)
      coordinator_.worker_leaves(worker.id, !placement_.has_place(slot), time_now());
}

/// A node that joins by itself has no slots until it joins again.
void ElasticJob::agent_gone(std::size_t index) {
  Host& host = hosts_[index];
  host.leaving = false;
  if (host.joins) host.slots = 0;
  use_slots(index);
}

/// Closes the connections to agents whose hosts have left the job. These agents then end.
void ElasticJob::dismiss_agents() {
  for (std::size_t index = 0; index < hosts_.size(); ++index) {
    Host& host = hosts_[index];
    const bool has_agent = host.connected || host.agent > 0;
    const bool works = std::any_of(workers_.begin(), workers_.end(), [index](const auto& worker) {
      return worker.second.host == index;
    });
    if (!has_agent || works || placement_.has_place_on(index)) continue;
    if (host.agent > 0) {
      if (!host.connected) ::kill(host.agent, SIGTERM);
      former_agents_.push_back(std::exchange(host.agent, -1));
    }
    host.connected = host.has_workers = false;
    host.connect_by.reset();
    server_.readmit(host.place.ranks);
    placement_.host_lost(index, time_now());
    agent_gone(index);
    coordinator_.host_lost(label(index), time_now());
  }
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

/// Ends the agents, which end their remaining workers.
void ElasticJob::end_agents() {
  closed_ = true;
  give_up_at_.reset();
  discovery_.reset();
  server_.finish_all(record_.code);
  for (const Host& host : hosts_)  // agents that have not connected
    if (host.agent > 0 && !host.connected) ::kill(host.agent, SIGTERM);
  kill_at_ = Clock::now() + kAgentGrace;
  agents_output_end_.reset();
}

/// The agent of a node that has joined by itself is not a child of this process, so its connection
/// shows whether it has been informed of the end.
bool ElasticJob::over() const {
  return closed_ && former_agents_.empty() && (!kill_at_ || server_.finished()) &&
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
