#include "processes/agent_spawner.h"

#include <csignal>
#include <filesystem>
#include <set>

#include "command/mpirun_command.h"
#include "system/process.h"
#include "system/text.h"

namespace hvd::launcher {

std::vector<std::string> AgentSpawner::command(const HostRanks& host) const {
  if (host.local) return {plan_.hvdrun, "--agent"};
  std::vector<std::string> command = plan_.remote_shell;
  // The shell on the remote host parses the command.
  command.insert(command.end(), {host.host, shell_quote(plan_.hvdrun), "--agent"});
  return command;
}

pid_t AgentSpawner::spawn(const HostRanks& host, HostOrder order, int output, int input_source) {
  if (!host.local) order.folder = std::filesystem::current_path();
  order.variables = host.local ? plan_.variables : remote_variables();
  order.program = plan_.program;
  Pipe input = make_pipe();
  SpawnOptions options;
  options.argv = command(host);
  options.environment = plan_.environment;
  options.stdin_fd = input.read_end.get();
  options.stdout_fd = output;
  options.stderr_fd = output;
  options.parent_death_signal = SIGTERM;
  // Only hvdrun handles Ctrl-C on a terminal: it gives the ranks the grace period.
  options.own_process_group = host.local;
  if (!host.local) options.blocked_signals = {SIGINT, SIGQUIT, SIGHUP};
  const pid_t pid = start_process(
      options, host.local
                   ? "; expected hvdrun itself: was it replaced?"
                   : "; expected a remote shell: install ssh, or name another one with --rsh");
  pumps_.push_back(
      std::make_unique<InputPump>(io_, input_source, std::move(input.write_end), encode(order)));
  return pid;
}

/// The variables that mpirun would export: forwarded ones, those that -x names, and hvdrun's own.
std::vector<std::pair<std::string, std::string>> AgentSpawner::remote_variables() const {
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

}  // namespace hvd::launcher
