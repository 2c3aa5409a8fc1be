#include "processes/host_supervisor.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>
#include <vector>

#include "processes/host_order.h"
#include "processes/rank_supervisor.h"
#include "system/error.h"
#include "system/unique_fd.h"

namespace hvd::launcher {
namespace {

constexpr int kOrderTimeoutMs = 60'000;

std::vector<pid_t> start_supervisors(const HostOrder& order) {
  std::vector<std::string> environment = current_environment();
  for (const auto& [name, value] : order.variables) set_variable(environment, name, value);
  set_variable(environment, "PWD", order.folder);
  const UniqueFd no_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  RankIdentity identity{.size = order.size, .local_size = static_cast<int>(order.ranks.size())};
  std::vector<pid_t> supervisors;
  for (const int rank : order.ranks) {
    identity.rank = rank;
    SpawnOptions options = supervisor_of(own_executable(), order.program, identity, environment);
    if (rank != 0) options.stdin_fd = no_input.get();  // rank 0 reads this process's input
    const SpawnResult result = spawn(options);
    if (result.error != 0)
      throw LaunchError(ExitCode::kInternal,
                        std::string("cannot start a supervisor: ") + std::strerror(result.error));
    supervisors.push_back(result.pid);
    ++identity.local_rank;
  }
  return supervisors;
}

}  // namespace

int run_host_supervisor() {
  const auto order = read_host_order(STDIN_FILENO, kOrderTimeoutMs);
  if (!order) {
    throw LaunchError(ExitCode::kUsage,
                      "--supervise-host is for hvdrun's own use: expected its order at standard "
                      "input, got something else or nothing; another version of hvdrun on this "
                      "host makes that too");
  }
  if (::chdir(order->folder.c_str()) != 0) {
    throw LaunchError(ExitCode::kUnavailable,
                      own_hostname() + ": cannot enter " + order->folder +
                          ", the folder that hvdrun was started in: " + std::strerror(errno));
  }
  const sigset_t signals = supervised_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  std::vector<pid_t> supervisors = start_supervisors(*order);
  int code = 0;
  while (!supervisors.empty()) {
    const int signal = ::sigwaitinfo(&signals, nullptr);
    std::erase_if(supervisors, [&](pid_t supervisor) {
      if (signal > 0 && signal != SIGCHLD) ::kill(supervisor, signal);
      const auto end = try_wait(supervisor);
      if (end && code == 0) code = end->code;
      return end.has_value();
    });
  }
  return code;
}

}  // namespace hvd::launcher
