#include "hvdrun_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "system/error.h"
#include "system/process.h"

namespace hvd::launcher::test {
namespace {

double seconds_since(long long start_ns) {
  return static_cast<double>(realtime_ns() - start_ns) / 1e9;
}

/// The fields of /proc/PID/stat after the name: the state, the parent, ... Empty if there is no
/// such process.
std::string stat_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const std::size_t end = line.rfind(") ");
  return end == std::string::npos ? "" : line.substr(end + 2);
}

char state_of(pid_t pid) {
  const std::string fields = stat_of(pid);
  return fields.empty() ? '\0' : fields[0];
}

pid_t parent_of(pid_t pid) {
  const std::string fields = stat_of(pid);
  return fields.size() < 3 ? 0 : static_cast<pid_t>(std::atoi(fields.c_str() + 2));
}

UniqueFd open_terminal(UniqueFd& slave) {
  UniqueFd master(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  std::array<char, 64> name{};
  if (!master || ::grantpt(master.get()) != 0 || ::unlockpt(master.get()) != 0 ||
      ::ptsname_r(master.get(), name.data(), name.size()) != 0) {
    throw LaunchError(ExitCode::kInternal, "the test cannot make a pseudo-terminal");
  }
  slave = UniqueFd(::open(name.data(), O_RDWR | O_NOCTTY | O_CLOEXEC));
  return master;
}

}  // namespace

HvdrunProcess::HvdrunProcess(const Start& start) : started_ns_(realtime_ns()) {
  Pipe input = make_pipe();
  Pipe output = make_pipe();
  Pipe errors = make_pipe();
  if (start.terminal) output.read_end = open_terminal(output.write_end);
  if (::write(input.write_end.get(), start.input.data(), start.input.size()) < 0) {
    throw LaunchError(ExitCode::kInternal, "the test cannot write its input");
  }
  SpawnOptions options;
  options.argv = start.prefix;
  options.argv.push_back(start.program.empty() ? hvdrun() : start.program);
  const char* const controller = std::getenv("LAUNCHER_TEST_CONTROLLER");
  const bool names_one = std::find(start.arguments.begin(), start.arguments.end(),
                                   "--controller") != start.arguments.end();
  if (start.program.empty() && controller != nullptr && !names_one)
    options.argv.insert(options.argv.end(), {"--controller", controller});
  options.argv.insert(options.argv.end(), start.arguments.begin(), start.arguments.end());
  options.environment = current_environment();
  set_variable(options.environment, "TMPDIR", temporary_.path());
  for (const auto& [name, value] : start.environment)
    set_variable(options.environment, name, value);
  options.stdin_fd = input.read_end.get();
  options.stdout_fd = output.write_end.get();
  options.stderr_fd = errors.write_end.get();
  options.own_process_group = true;
  options.parent_death_signal = SIGTERM;
  const SpawnResult result = spawn(options);
  if (result.error != 0)
    throw LaunchError(ExitCode::kInternal, "the test cannot run " + options.argv[0]);
  pid_ = result.pid;
  stdout_ = std::move(output.read_end);
  stderr_ = std::move(errors.read_end);
}

HvdrunProcess::~HvdrunProcess() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void HvdrunProcess::signal(int number) const { ::kill(pid_, number); }
void HvdrunProcess::signal_group(int number) const { ::kill(-pid_, number); }

void HvdrunProcess::read_some(int timeout_ms) {
  std::array<pollfd, 2> polls = {pollfd{stdout_.get(), POLLIN, 0},
                                 pollfd{stderr_.get(), POLLIN, 0}};
  if (::poll(polls.data(), polls.size(), timeout_ms) <= 0) return;
  static std::array<char, 256 * 1024> buffer;
  for (std::size_t i = 0; i < polls.size(); ++i) {
    if (polls[i].revents == 0) continue;
    UniqueFd& from = i == 0 ? stdout_ : stderr_;
    const ssize_t size = ::read(from.get(), buffer.data(), buffer.size());
    if (size > 0) {
      (i == 0 ? out_ : err_).append(buffer.data(), static_cast<std::size_t>(size));
    } else if (size == 0 || errno != EINTR) {
      from.reset();
    }
  }
}

bool HvdrunProcess::wait_for(const std::string& text, int times, double timeout_s) {
  const long long start = realtime_ns();
  while (count(out_, text) + count(err_, text) < times) {
    if (seconds_since(start) > timeout_s || (!stdout_ && !stderr_)) return false;
    read_some(50);
  }
  return true;
}

Result HvdrunProcess::wait(double timeout_s) {
  const long long start = realtime_ns();
  Result result;
  while (pid_ > 0) {
    if (const auto status = try_wait(pid_)) {
      result.code = status->code;
      result.seconds = seconds_since(started_ns_);
      pid_ = -1;
    } else if (seconds_since(start) > timeout_s) {
      ::kill(pid_, SIGKILL);
      while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
      }
      result.seconds = seconds_since(started_ns_);
      pid_ = -1;
    } else {
      read_some(5);
    }
  }
  // A process that outlives hvdrun and holds its pipes must not hang the test.
  const long long ended = realtime_ns();
  while ((stdout_ || stderr_) && seconds_since(ended) < 2) read_some(50);
  result.out = out_;
  result.err = err_;
  return result;
}

Result run_hvdrun(const std::vector<std::string>& arguments, double timeout_s) {
  Start start;
  start.arguments = arguments;
  return HvdrunProcess(start).wait(timeout_s);
}

std::string rank_program() { return HVD_TEST_RANK_PROGRAM; }
std::string mpi_program() {
  return std::getenv("HVD_TEST_MPIEXEC") != nullptr ? HVD_TEST_MPI_ABI_PROGRAM
                                                    : HVD_TEST_MPI_PROGRAM;
}
std::string hvdrun() { return HVD_TEST_HVDRUN; }

std::string unique_marker() {
  static std::atomic<int> next{0};
  return "marker-" + std::to_string(::getpid()) + "-" + std::to_string(realtime_ns()) + "-" +
         std::to_string(next++);
}

std::vector<pid_t> processes_with(const std::string& marker) {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator(
           "/proc", std::filesystem::directory_options::skip_permission_denied)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(entry.path() / "cmdline");
    std::ostringstream line;
    line << file.rdbuf();
    if (line.str().find(marker) != std::string::npos)
      found.push_back(static_cast<pid_t>(std::atoi(name.c_str())));
  }
  return found;
}

std::vector<pid_t> agents_of(pid_t hvdrun) {
  const auto descends = [hvdrun](pid_t pid) {
    while (pid > 1 && pid != hvdrun) pid = parent_of(pid);
    return pid == hvdrun;
  };
  std::vector<pid_t> agents = processes_with(std::string("\0--agent\0", 9));
  std::erase_if(agents, [&](pid_t pid) { return !descends(pid); });
  return agents;
}

pid_t pid_of_worker(int worker, const std::string& out) {
  const std::string line = "worker " + std::to_string(worker) + " pid ";
  const std::size_t at = out.find(line);
  return at == std::string::npos ? -1 : std::atoi(out.c_str() + at + line.size());
}

pid_t agent_of_host(int host, const HvdrunProcess& hvdrun) {
  const std::vector<pid_t> agents = agents_of(hvdrun.pid());
  for (const std::string& line : lines_of(hvdrun.out())) {
    const std::size_t at = line.find(" pid ");
    if (at == std::string::npos ||
        line.find(" host " + std::to_string(host) + " slot ") == std::string::npos)
      continue;
    pid_t process = std::atoi(line.c_str() + at + 5);
    while (process > 1 && std::ranges::find(agents, process) == agents.end())
      process = parent_of(process);
    if (process > 1) return process;
  }
  return -1;
}

std::vector<pid_t> wait_until_gone(std::vector<pid_t> processes, double timeout_s) {
  const long long start = realtime_ns();
  while (true) {
    std::erase_if(processes, [](pid_t pid) { return state_of(pid) == 'Z' || state_of(pid) == 0; });
    if (processes.empty() || seconds_since(start) > timeout_s) return processes;
    ::usleep(20'000);
  }
}

std::vector<pid_t> wait_until_gone(const std::string& marker, double timeout_s) {
  const long long start = realtime_ns();
  while (true) {
    std::vector<pid_t> left = processes_with(marker);
    if (left.empty() || seconds_since(start) > timeout_s) return left;
    ::usleep(20'000);
  }
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + part.size()))
    ++found;
  return found;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace hvd::launcher::test
