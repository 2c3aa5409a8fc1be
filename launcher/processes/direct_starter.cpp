#include "processes/direct_starter.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "base/text.h"
#include "command/mpirun_command.h"
#include "processes/host_supervisor.h"
#include "processes/mpirun_starter.h"
#include "system/error.h"
#include "system/process.h"
#include "system/text.h"

// Note [Starting without mpirun]
//
//   hvdrun ----- supervisor ----- program                    this host: one chain per rank
//      |
//      +-- ssh h2 .. hvdrun --supervise-host ----- supervisor ----- program
//
// The chains are those of mpirun without the front processes, which only mpirun needs. A supervisor
// connects to hvdrun from any host, and from then on it does not matter how it was started. The
// order for a remote host, with the token, goes through the remote shell's standard input, where
// `ps` does not show it. Rank 0's input follows it there.
//
// No process outlives hvdrun: when it dies, the kernel sends SIGTERM to the processes that it
// started here; on other hosts a supervisor's connection ends or cannot be made, and
// --supervise-host without an order reads the end of its input.

namespace hvd::launcher {
namespace {

bool may_read(int fd) { return ::isatty(fd) != 1 || ::tcgetpgrp(fd) == ::getpgrp(); }

}  // namespace

InputPump::InputPump(int source, UniqueFd target, std::string head)
    : source_(source), target_(std::move(target)), pending_(std::move(head)) {
  set_nonblocking(target_.get());
  write();
}

void InputPump::add_to(Poller& poller) {
  if (!target_) return;
  // Even without pending input the target is polled, to detect that its reader has closed it.
  poller.add(target_.get(), pending_.empty() ? 0 : POLLOUT, [this](short revents) {
    if (!target_) return;
    if (pending_.empty() && (revents & (POLLERR | POLLHUP)) != 0) return target_.reset();
    write();
  });
  if (pending_.empty() && source_ >= 0 && may_read(source_))
    poller.add(source_, POLLIN, [this](short) { read(); });
}

void InputPump::read() {
  if (!target_ || !pending_.empty()) return;
  std::array<char, 16 * 1024> buffer;
  const ssize_t count = ::read(source_, buffer.data(), buffer.size());
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (count > 0) {
    pending_.assign(buffer.data(), static_cast<std::size_t>(count));
  } else {
    source_ = -1;
  }
  write();
}

void InputPump::write() {
  while (!pending_.empty()) {
    const ssize_t count = ::write(target_.get(), pending_.data(), pending_.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EAGAIN) return;
    if (count <= 0) return target_.reset();
    pending_.erase(0, static_cast<std::size_t>(count));
  }
  if (source_ < 0) target_.reset();
}

DirectStarter::DirectStarter(LaunchPlan plan, Show show)
    : plan_(std::move(plan)),
      hosts_(place_ranks(plan_.np, plan_.hosts, plan_.hostname)),
      show_(std::move(show)) {}

std::vector<std::string> DirectStarter::remote_command(const std::string& host) const {
  std::vector<std::string> command = plan_.remote_shell;
  // The shell on the remote host parses the command.
  command.insert(command.end(), {host, shell_quote(plan_.hvdrun), "--supervise-host"});
  return command;
}

std::vector<std::string> DirectStarter::commands() const {
  std::vector<std::string> lines;
  for (const HostRanks& host : hosts_) {
    std::vector<std::string> words;
    if (host.local) {
      words = {plan_.hvdrun, "--supervise", "--"};
      words.insert(words.end(), plan_.program.begin(), plan_.program.end());
    } else {
      words = remote_command(host.host);
    }
    for (std::string& word : words) word = shell_quote(word);
    lines.push_back(
        text(rank_list(host.ranks), host.local ? ", each: " : ": ", join_text(words, " ")));
  }
  return lines;
}

void DirectStarter::start() {
  Pipe output = make_pipe();
  output_ = std::move(output.read_end);
  output_for_children_ = std::move(output.write_end);
  pumps_.reserve(hosts_.size());
  // Remote ranks take longer to start, so they start first.
  for (const bool local : {false, true}) {
    for (const HostRanks& host : hosts_) {
      if (host.local == local) local ? start_local(host) : start_remote(host);
    }
  }
  output_for_children_.reset();
}

void DirectStarter::run(SpawnOptions options, Child child, const std::string& advice) {
  options.stdout_fd = output_for_children_.get();
  options.stderr_fd = output_for_children_.get();
  child.pid = start_process(options, advice);
  children_.push_back(std::move(child));
}

void DirectStarter::start_local(const HostRanks& host) {
  std::vector<std::string> environment = plan_.environment;
  for (const auto& [name, value] : plan_.variables) set_variable(environment, name, value);
  const UniqueFd no_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  RankIdentity identity{.size = plan_.np, .local_size = static_cast<int>(host.ranks.size())};
  for (const int rank : host.ranks) {
    identity.rank = rank;
    SpawnOptions options = supervisor_of(plan_.hvdrun, plan_.program, identity, environment);
    Pipe input;
    if (rank == 0) input = make_pipe();
    options.stdin_fd = rank == 0 ? input.read_end.get() : no_input.get();
    run(std::move(options), {.ranks = {rank}}, "; expected hvdrun itself: was it replaced?");
    if (rank == 0) pumps_.emplace_back(STDIN_FILENO, std::move(input.write_end));
    ++identity.local_rank;
  }
}

void DirectStarter::start_remote(const HostRanks& host) {
  HostOrder order;
  order.folder = std::filesystem::current_path();
  order.variables = remote_variables();
  order.program = plan_.program;
  order.size = plan_.np;
  order.ranks = host.ranks;
  Pipe input = make_pipe();
  SpawnOptions options;
  options.argv = remote_command(host.host);
  options.environment = plan_.environment;
  options.stdin_fd = input.read_end.get();
  options.parent_death_signal = SIGTERM;
  options.blocked_signals = {SIGINT, SIGQUIT, SIGHUP};  // only hvdrun handles a terminal's
  run(std::move(options), {.ranks = host.ranks, .host = host.host},
      "; expected a remote shell: install ssh, or name another one with --rsh");
  const bool feeds_rank_0 = host.ranks.front() == 0;
  pumps_.emplace_back(feeds_rank_0 ? STDIN_FILENO : -1, std::move(input.write_end), encode(order));
}

/// The variables that mpirun would export: forwarded ones, those that -x names, and hvdrun's own.
std::vector<std::pair<std::string, std::string>> DirectStarter::remote_variables() const {
  const std::set<std::string> exports(plan_.exports.begin(), plan_.exports.end());
  std::vector<std::pair<std::string, std::string>> variables;
  for (const std::string& entry : plan_.environment) {
    const std::size_t equals = entry.find('=');
    const std::string name = entry.substr(0, equals);
    if (equals == std::string::npos || !(is_forwarded(name) || exports.contains(name))) continue;
    variables.emplace_back(name, entry.substr(equals + 1));
  }
  variables.insert(variables.end(), plan_.variables.begin(), plan_.variables.end());
  return variables;
}

void DirectStarter::add_to(Poller& poller) {
  for (InputPump& pump : pumps_) pump.add_to(poller);
  if (!output_) return;
  poller.add(output_.get(), POLLIN, [this](short) {
    if (!output_) return;
    std::array<char, 8192> buffer;
    const ssize_t count = ::read(output_.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) return;
    if (count <= 0) return output_.reset();
    wrote_ = true;
    show_({buffer.data(), static_cast<std::size_t>(count)});
  });
}

std::vector<JobStarter::Exit> DirectStarter::reap() {
  std::vector<Exit> exits;
  for (Child& child : children_) {
    if (child.end) continue;
    child.end = try_wait(child.pid);
    if (child.end) exits.push_back({.ranks = child.ranks});
  }
  if (!exits.empty()) {
    exits.back().last = std::all_of(children_.begin(), children_.end(),
                                    [](const Child& child) { return child.end.has_value(); });
  }
  return exits;
}

void DirectStarter::signal_all(int signal) {
  for (Child& child : children_) {
    if (child.end) continue;
    child.stopped = true;
    ::kill(child.pid, signal);
  }
}

void DirectStarter::explain(JobRecord& record) const {
  record.starter_wrote = wrote_;
  record.starter = "hvdrun's supervisors";
  for (const Child& child : children_) {
    // A remote shell has done its work when its ranks have connected. A supervisor must also have
    // reported its program's end: hvdrun may receive the hello of a killed supervisor only after it
    // has reaped the process.
    const bool did_its_work = std::all_of(child.ranks.begin(), child.ranks.end(), [&](int rank) {
      const RankRecord& known = record.rank(rank);
      return known.connected && (known.ended || !child.host.empty());
    });
    if (!child.end || child.stopped || did_its_work) continue;
    const bool first = record.starter_code == 0;
    if (first) record.starter_code = child.end->code;
    if (child.host.empty()) {
      if (first) record.starter = text("the supervisor of rank ", child.ranks.front());
      continue;
    }
    if (first) record.starter = std::filesystem::path(plan_.remote_shell.front()).filename();
    record.suspect_hosts.push_back(child.host);
    const bool missing = child.end->code == static_cast<int>(ExitCode::kNotFound) ||
                         child.end->code == static_cast<int>(ExitCode::kCannotRun);
    (missing ? record.lacks_executable : record.lost_host) = true;
  }
}

std::unique_ptr<JobStarter> make_starter(const LaunchPlan& plan, bool verbose,
                                         JobStarter::Show show) {
  if (plan.controller.controller == Controller::kUcx)
    return std::make_unique<DirectStarter>(plan, std::move(show));
  return std::make_unique<MpirunStarter>(plan, verbose, std::move(show));
}

}  // namespace hvd::launcher
