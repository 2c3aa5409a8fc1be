#include "system/children.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "system/error.h"
#include "system/process.h"
#include "system/unique_fd.h"

namespace hvd::launcher {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Interval at which a process that has closed its output is checked for its end.
constexpr milliseconds kEndStep{5};

struct Child {
  pid_t pid = -1;  ///< -1: it has ended
  UniqueFd out = {}, err = {};
  ChildResult result = {};
};

pid_t fork_function(const std::function<void(int fd)>& function, int fd) {
  const pid_t pid = ::fork();
  if (pid < 0)
    throw LaunchError(ExitCode::kInternal, text("cannot make a process: ", std::strerror(errno)));
  if (pid > 0) return pid;
  const int nowhere = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(nowhere, standard);
  function(fd);
  ::_exit(0);
}

Child start(const ChildCommand& command) {
  Pipe out = make_pipe();
  if (command.function) {
    const pid_t pid = fork_function(command.function, out.write_end.get());
    return {.pid = pid, .out = std::move(out.read_end)};
  }
  Pipe err = make_pipe();
  const UniqueFd no_input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  SpawnOptions options;
  options.argv = command.argv;
  options.environment = current_environment();
  options.stdin_fd = no_input.get();
  options.stdout_fd = out.write_end.get();
  options.stderr_fd = err.write_end.get();
  options.parent_death_signal = SIGTERM;
  const SpawnResult spawned = spawn(options);
  if (spawned.error != 0) {
    return {.result = {.code = 127,
                       .err = text(command.argv.front(), ": ", std::strerror(spawned.error))}};
  }
  return {.pid = spawned.pid, .out = std::move(out.read_end), .err = std::move(err.read_end)};
}

void read_from(UniqueFd& fd, std::string& text) {
  std::array<char, 16 * 1024> buffer;
  const ssize_t count = ::read(fd.get(), buffer.data(), buffer.size());
  if (count > 0) {
    text.append(buffer.data(), static_cast<std::size_t>(count));
  } else if (count == 0 || (errno != EINTR && errno != EAGAIN)) {
    fd.reset();
  }
}

/// Reads until all processes have ended and closed their outputs, or until `deadline`. Returns
/// whether they have.
bool finish_all(std::vector<Child>& children, Clock::time_point deadline) {
  while (true) {
    std::vector<pollfd> polls;
    std::vector<std::pair<UniqueFd*, std::string*>> sources;
    bool closed = false;  // a process runs on without an output
    for (Child& child : children) {
      for (const auto& [fd, text] :
           {std::pair(&child.out, &child.result.out), std::pair(&child.err, &child.result.err)}) {
        if (!*fd) continue;
        polls.push_back({fd->get(), POLLIN, 0});
        sources.emplace_back(fd, text);
      }
      if (child.out || child.err || child.pid < 0) continue;
      if (const auto end = try_wait(child.pid)) {
        child.result.code = end->code;
        child.pid = -1;
      }
      closed = closed || child.pid > 0;
    }
    if (polls.empty() && !closed) return true;
    const milliseconds left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) return false;
    const milliseconds step = std::min(left, closed ? kEndStep : milliseconds(60'000));
    if (::poll(polls.data(), polls.size(), static_cast<int>(step.count())) <= 0) continue;
    for (std::size_t i = 0; i < polls.size(); ++i)
      if (polls[i].revents != 0) read_from(*sources[i].first, *sources[i].second);
  }
}

}  // namespace

std::vector<ChildResult> run_children(const std::vector<ChildCommand>& commands, double seconds) {
  std::vector<Child> children;
  for (const ChildCommand& command : commands) children.push_back(start(command));
  auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(seconds));
  for (const int signal : {SIGTERM, SIGKILL}) {
    if (finish_all(children, deadline)) break;
    for (Child& child : children) {
      if (child.pid < 0) continue;
      child.result.timed_out = true;
      ::kill(child.pid, signal);
    }
    deadline = Clock::now() + std::chrono::seconds(1);
  }
  std::vector<ChildResult> results;
  for (Child& child : children) {
    if (child.pid > 0) child.result.code = wait_for(child.pid).code;  // it was killed
    results.push_back(std::move(child.result));
  }
  return results;
}

}  // namespace hvd::launcher
