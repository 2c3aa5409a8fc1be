#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace hvd::testing {

using Environment = std::map<std::string, std::string>;

/// How often `text` contains `part`.
inline int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// A process that a test starts as a shell would. Its environment has no variables of launchers
/// except those that the test sets.
class Process {
 public:
  Process(const std::vector<std::string>& command, const Environment& environment) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0)
      throw std::system_error(errno, std::generic_category(), "pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], 1);
      ::dup2(ends[1], 2);
      for (const char* const name :
           {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_SIZE",
            "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HVD_RANK", "HVD_SIZE"})
        ::unsetenv(name);
      for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
      std::vector<char*> arguments;
      for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
      arguments.push_back(nullptr);
      ::execvp(arguments.front(), arguments.data());
      ::_exit(127);
    }
    ::close(ends[1]);
    output_ = ends[0];
  }
  Process(Process&& other) noexcept
      : pid_(std::exchange(other.pid_, 0)),
        output_(std::exchange(other.output_, -1)),
        written_(std::move(other.written_)) {}
  Process& operator=(Process&&) = delete;
  ~Process() {
    if (output_ >= 0) ::close(output_);
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  pid_t pid() const noexcept { return pid_; }
  /// Whether the process has ended. It may be a zombie.
  bool has_ended() const {
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
           info.si_pid != 0;
  }

  struct End {
    int code = -1;       ///< 128 + the signal that ended it
    std::string output;  ///< stdout and stderr
  };
  using Deadline = std::chrono::steady_clock::time_point;
  enum class Read { kMore, kEnd, kLate };
  /// Reads more of the process's output. kEnd: the process has closed it. kLate: the deadline has
  /// passed.
  Read read_some(Deadline deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    pollfd look{.fd = output_, .events = POLLIN, .revents = 0};
    if (left.count() <= 0 || ::poll(&look, 1, static_cast<int>(left.count())) == 0)
      return Read::kLate;
    std::array<char, 4096> buffer{};
    const ssize_t got = ::read(output_, buffer.data(), buffer.size());
    if (got <= 0) return Read::kEnd;
    written_.append(buffer.data(), static_cast<std::size_t>(got));
    return Read::kMore;
  }
  /// Waits until the process has written `text` this many times. Returns false when its output ends
  /// or the deadline passes.
  bool wait_for(const std::string& text, int times, Deadline deadline) {
    while (count(written_, text) < times)
      if (read_some(deadline) != Read::kMore) return false;
    return true;
  }
  /// Waits for the process to end. Kills it at the deadline, and adds a line about that to its
  /// output.
  End wait(Deadline deadline) {
    Read read = Read::kMore;
    while (read == Read::kMore) read = read_some(deadline);
    if (read == Read::kLate) {
      written_ += "\nTHE TEST HAS KILLED IT";
      ::kill(pid_, SIGKILL);
    }
    int status = 0;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
            .output = written_};
  }
  void signal(int number) const { ::kill(pid_, number); }
  const std::string& written() const noexcept { return written_; }

 private:
  pid_t pid_ = 0;
  int output_ = -1;
  std::string written_;
};

}  // namespace hvd::testing
