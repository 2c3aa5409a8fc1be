#include "system/process.h"

#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "base/text.h"
#include "system/error.h"

namespace hvd::launcher {
namespace {

std::vector<char*> as_pointers(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

void redirect(int from, int to) {
  // dup2 onto itself would leave close-on-exec set.
  if (from == to) {
    ::fcntl(to, F_SETFD, 0);
  } else if (from >= 0) {
    ::dup2(from, to);
  }
}

/// Runs in the child, so it makes only async-signal-safe calls and does not allocate memory.
[[noreturn]] void become(const SpawnOptions& options, char* const* argv, char* const* environment,
                         pid_t parent, int error_fd) {
  if (options.own_process_group) ::setpgid(0, 0);
  if (options.parent_death_signal != 0) {
    ::prctl(PR_SET_PDEATHSIG, options.parent_death_signal);
    if (::getppid() != parent) ::_exit(static_cast<int>(ExitCode::kInternal));
  }
  bind_to(options.cpus);
  redirect(options.stdin_fd, STDIN_FILENO);
  redirect(options.stdout_fd, STDOUT_FILENO);
  redirect(options.stderr_fd, STDERR_FILENO);
  if (options.inherited_fd >= 0) ::fcntl(options.inherited_fd, F_SETFD, 0);
  ::signal(SIGPIPE, SIG_DFL);
  sigset_t mask;
  ::sigemptyset(&mask);
  for (const int signal : options.blocked_signals) ::sigaddset(&mask, signal);
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execvpe(argv[0], argv, environment);
  const int error = errno;
  const ssize_t written = ::write(error_fd, &error, sizeof error);
  ::_exit(written > 0 && error == ENOENT ? 127 : 126);
}

/// How `pid` ended; empty while it runs, or if it is not a child of this process.
std::optional<ExitStatus> wait_with(pid_t pid, int options) {
  siginfo_t info{};
  int error = 0;
  do {
    error = ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | options);
  } while (error != 0 && errno == EINTR);
  if (error != 0 || info.si_pid != pid) return std::nullopt;
  if (info.si_code == CLD_EXITED) return ExitStatus{.code = info.si_status};
  return ExitStatus{.code = 128 + info.si_status,
                    .signal = info.si_status,
                    .dumped_core = info.si_code == CLD_DUMPED};
}

}  // namespace

void bind_to(const std::vector<int>& cpus) {
  // Also called between fork and exec, so it must not allocate memory. The set has room for all
  // CPUs of any Linux kernel.
  constexpr int kMaxCpus = 8192;
  std::array<unsigned long, kMaxCpus / (8 * sizeof(unsigned long))> mask{};
  auto* const set = reinterpret_cast<cpu_set_t*>(mask.data());
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < kMaxCpus) CPU_SET_S(static_cast<std::size_t>(cpu), sizeof mask, set);
  }
  if (!cpus.empty()) ::sched_setaffinity(0, sizeof mask, set);
}

Pipe make_pipe() {
  std::array<int, 2> fds{};
  if (::pipe2(fds.data(), O_CLOEXEC) != 0) {
    throw LaunchError(ExitCode::kInternal, text("cannot make a pipe: ", std::strerror(errno)));
  }
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

SpawnResult spawn(const SpawnOptions& options) {
  Pipe errors = make_pipe();
  const auto argv = as_pointers(options.argv);
  const auto environment = as_pointers(options.environment);
  const pid_t parent = ::getpid();
  SpawnResult result;
  result.pid = ::fork();
  if (result.pid < 0) {
    throw LaunchError(ExitCode::kInternal,
                      text("cannot start ", options.argv[0], ": fork: ", std::strerror(errno)));
  }
  if (result.pid == 0)
    become(options, argv.data(), environment.data(), parent, errors.write_end.get());
  errors.write_end.reset();
  int error = 0;
  ssize_t count = 0;
  do {
    count = ::read(errors.read_end.get(), &error, sizeof error);
  } while (count < 0 && errno == EINTR);
  if (count == static_cast<ssize_t>(sizeof error)) {
    result.error = error;
    wait_for(result.pid);
  }
  return result;
}

pid_t start_process(const SpawnOptions& options, const std::string& advice) {
  const SpawnResult result = spawn(options);
  if (result.error == 0) return result.pid;
  throw LaunchError(
      result.error == ENOENT ? ExitCode::kNotFound : ExitCode::kCannotRun,
      text("cannot run '", options.argv[0], "': ", std::strerror(result.error), advice));
}

int execute(const std::vector<std::string>& argv, const std::vector<std::string>& environment) {
  const auto words = as_pointers(argv);
  ::execvpe(words[0], words.data(), as_pointers(environment).data());
  return errno;
}

std::optional<ExitStatus> peek_exit(pid_t pid) { return wait_with(pid, WNOHANG | WNOWAIT); }

std::optional<ExitStatus> try_wait(pid_t pid) { return wait_with(pid, WNOHANG); }

ExitStatus wait_for(pid_t pid) { return wait_with(pid, 0).value_or(ExitStatus{}); }

std::vector<std::string> current_environment() {
  std::vector<std::string> environment;
  for (char** variable = environ; *variable != nullptr; ++variable)
    environment.emplace_back(*variable);
  return environment;
}

std::optional<std::string> environment_variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

void set_variable(std::vector<std::string>& environment, const std::string& name,
                  const std::optional<std::string>& value) {
  const std::string prefix = name + "=";
  std::erase_if(environment,
                [&](const std::string& variable) { return variable.starts_with(prefix); });
  if (value) environment.push_back(prefix + *value);
}

ProgramSearch find_program(const std::string& program) {
  ProgramSearch search;
  const auto consider = [&](const std::string& path) {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0 || S_ISDIR(info.st_mode)) return;
    const bool executable = ::access(path.c_str(), X_OK) == 0;
    if (search.executable || (search.found && !executable)) return;
    search = {path, true, executable};
  };
  if (program.find('/') != std::string::npos) {
    consider(program);
    return search;
  }
  const char* path = std::getenv("PATH");
  for (const std::string_view folder :
       split_text(path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin", ':')) {
    consider(text(folder.empty() ? "." : folder, "/", program));
  }
  return search;
}

std::string own_executable() {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error)
    throw LaunchError(ExitCode::kInternal, "cannot read /proc/self/exe: " + error.message());
  return path;
}

std::string own_hostname() {
  std::array<char, HOST_NAME_MAX + 1> buffer{};
  ::gethostname(buffer.data(), buffer.size() - 1);
  return buffer.data();
}

void set_nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

void raise_descriptor_limit(std::size_t needed, const std::string& where,
                            const std::string& for_what) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  if (limit.rlim_max < needed) {
    throw LaunchError(
        ExitCode::kUnavailable,
        text("too few file descriptors", where, ": expected at least ", needed, " for ", for_what,
             ", got a limit of ", limit.rlim_max, "; raise it (ulimit -Hn)"));
  }
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

long long realtime_ns() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::vector<pid_t> group_members(pid_t group) {
  std::vector<pid_t> members;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const auto process = parse_number<pid_t>(entry.path().filename().native());
    if (process && ::getpgid(*process) == group) members.push_back(*process);
  }
  return members;
}

bool handles(pid_t process, int signal) {
  constexpr std::string_view kCaught = "SigCgt:";
  std::ifstream status(text("/proc/", process, "/status"));
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(kCaught)) continue;
    const std::uint64_t mask = std::strtoull(line.c_str() + kCaught.size(), nullptr, 16);
    return (mask >> (signal - 1) & 1) != 0;
  }
  return false;
}

}  // namespace hvd::launcher
