#include "hvd/launch.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <system_error>
#include <thread>

#include "base/text.h"
#include "hvd/hvd.h"

// Note [Ranks of launch()]
// Each rank is a forked process with a pipe to its parent. A rank writes one message: kReturned and
// the encoded result, or kThrew, the time, whether the error is a consequence of another rank's,
// and the text. The message is complete at the end of the pipe. A rank without a message has been
// killed, or has called exit().
//
// The ranks find each other in a file of a temporary folder, which the parent removes. The parent
// ends a rank by its process id, and a rank that loses its parent is killed by the kernel
// (PR_SET_PDEATHSIG).

namespace hvd::libtorch {
namespace {

namespace fs = std::filesystem;
using SteadyTime = std::chrono::steady_clock::time_point;

constexpr char kReturned = 'R';
constexpr char kThrew = 'E';

/// The names of this process's threads.
std::vector<std::string> thread_names() {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator tasks("/proc/self/task", error);
       !error && tasks != fs::directory_iterator(); tasks.increment(error)) {
    std::string& name = names.emplace_back();
    std::getline(std::ifstream(tasks->path() / "comm"), name);
  }
  return names;
}

/// The number of threads when this library was loaded, or when this rank's function began.
std::size_t expected_threads = thread_names().size();

/// Returns whether this process has initialised CUDA. Does not call CUDA, because that would
/// initialise it.
bool uses_cuda() {
  std::error_code error;
  for (fs::directory_iterator files("/proc/self/fd", error);
       !error && files != fs::directory_iterator(); files.increment(error)) {
    std::error_code ignored;
    const fs::path target = fs::read_symlink(files->path(), ignored);
    if (target == "/dev/nvidia-uvm" || target == "/dev/dxg") return true;
  }
  return false;
}

/// Set while a thread is in launch().
std::atomic<bool> launching{false};

void refuse_threads() {
  const std::vector<std::string> names = thread_names();
  if (names.size() <= expected_threads) return;
  std::map<std::string, int> counts;
  for (const std::string& name : names) ++counts[name];
  std::vector<std::string> shown;
  for (const auto& [name, number] : counts) shown.push_back(text(number, " '", name, "'"));
  throw UsageError(text(
      "hvd::launch: this process has ", names.size(), " threads (", join_text(shown, ", "),
      "), and ", expected_threads,
      " when hvd was loaded; expected no new ones, since a forked rank does not "
      "have them and may wait for them without end. LibTorch starts threads when it computes: call "
      "launch() before the first computation, begin the program with torch::set_num_threads(1), or "
      "pass allow_threads = true, with which each rank computes with one thread"));
}

void check_launch(const LaunchOptions& options) {
  if (options.num_processes < 1) {
    throw UsageError(
        text("hvd::launch: num_processes: expected at least 1, got ", options.num_processes));
  }
  if (options.grace.count() < 0)
    throw UsageError(
        text("hvd::launch: grace: expected 0 or more milliseconds, got ", options.grace.count()));
  if (is_initialized()) {
    throw UsageError(text("hvd::launch: this process is rank ", rank(), " of ", size(),
                          " of a job, since it has called hvd::init(), and forked ranks cannot use "
                          "its connections; call launch() before init() or after shutdown(), and "
                          "init() in the function"));
  }
  if (uses_cuda()) {
    throw UsageError(
        "hvd::launch: this process has used CUDA, which does not work in forked processes; call "
        "launch() before the first use of a GPU (torch::cuda::is_available() is one), and use GPUs "
        "in the function only");
  }
  if (!options.allow_threads) refuse_threads();
}

/// Records SIGINT, SIGTERM and SIGHUP instead of their actions. Signals that the program ignores
/// stay ignored. The destructor restores the actions. One object at a time.
class RecordedSignals {
 public:
  static constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};

  RecordedSignals() {
    if (::pipe2(wake_.data(), O_CLOEXEC | O_NONBLOCK) != 0)
      throw Error(text("hvd::launch: cannot make a pipe: ", std::strerror(errno)));
    last_signal = 0;
    wake_end = wake_[1];
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      ::sigaction(kSignals[i], nullptr, &former_[i]);
      if ((former_[i].sa_flags & SA_SIGINFO) == 0 && former_[i].sa_handler == SIG_IGN) continue;
      struct sigaction action {};
      action.sa_handler = record;
      action.sa_flags = SA_RESTART;
      ::sigemptyset(&action.sa_mask);
      ::sigaction(kSignals[i], &action, nullptr);
    }
  }
  RecordedSignals(const RecordedSignals&) = delete;
  RecordedSignals& operator=(const RecordedSignals&) = delete;
  ~RecordedSignals() {
    for (std::size_t i = 0; i < kSignals.size(); ++i)
      ::sigaction(kSignals[i], &former_[i], nullptr);
    wake_end = -1;
    for (const int end : wake_) ::close(end);
  }

  /// Readable when a signal has been recorded.
  int wake_descriptor() const noexcept { return wake_[0]; }
  /// The signal since the last call; 0 if there is none.
  int take() noexcept {
    std::array<char, 64> bytes{};
    while (::read(wake_[0], bytes.data(), bytes.size()) > 0) {
    }
    return last_signal.exchange(0);
  }

 private:
  static inline std::atomic<int> last_signal{0};
  static inline std::atomic<int> wake_end{-1};

  static void record(int number) {
    const int error = errno;
    last_signal.store(number);
    if (::write(wake_end.load(), "", 1) < 0) errno = error;
    errno = error;
  }

  std::array<int, 2> wake_{-1, -1};
  std::array<struct sigaction, 3> former_{};
};

/// Blocks the recorded signals in a scope: a rank receives them once it has the program's own
/// actions.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t signals;
    ::sigemptyset(&signals);
    for (const int number : RecordedSignals::kSignals) ::sigaddset(&signals, number);
    ::pthread_sigmask(SIG_BLOCK, &signals, &former_);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  ~BlockedSignals() { unblock(); }
  void unblock() const { ::pthread_sigmask(SIG_SETMASK, &former_, nullptr); }

 private:
  sigset_t former_{};
};

/// A folder that is removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_((fs::temp_directory_path() / "hvd-launch-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr) {
      throw Error(text("hvd::launch: cannot make the folder ", path_, ": ", std::strerror(errno),
                       "; set TMPDIR to a folder that can be written to"));
    }
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

struct LaunchedRank {
  pid_t pid = 0;  ///< 0 once it has ended
  int pipe = -1;  ///< -1 at its end
  std::string message = {};
  std::optional<int> status = {};  ///< from waitpid(); empty if the program's own waitpid() got it
  SteadyTime end = {};             ///< when the parent detected it
  bool stopped = false;            ///< the parent has sent it a signal
};

class LaunchedRanks {
 public:
  explicit LaunchedRanks(const LaunchOptions& options) : options_(options) {}
  LaunchedRanks(const LaunchedRanks&) = delete;
  LaunchedRanks& operator=(const LaunchedRanks&) = delete;
  ~LaunchedRanks() {
    send_signal(SIGKILL);
    for (LaunchedRank& rank : ranks_) {
      if (rank.pid > 0) reap(rank, 0);
      if (rank.pipe >= 0) ::close(rank.pipe);
    }
  }

  void start(const std::function<std::string()>& function);
  /// @return the signal that has interrupted the launch; 0 if there was none
  int wait();
  /// @throws RankError
  std::vector<std::string> results() const;

 private:
  [[noreturn]] void run_rank(int rank, int pipe, const std::function<std::string()>& function,
                             const BlockedSignals& blocked);
  void set_environment(int rank) const;
  void poll_until(SteadyTime deadline);
  void reap(LaunchedRank& rank, int flags);
  static void read_message(LaunchedRank& rank);
  void send_signal(int number);
  bool any_running() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank.pid > 0; });
  }
  static bool returned(const LaunchedRank& rank) {
    return rank.message.starts_with(kReturned) && rank.status.value_or(0) == 0;
  }

  const LaunchOptions options_;
  const pid_t parent_ = ::getpid();
  const TemporaryFolder folder_;
  std::optional<RecordedSignals> signals_{std::in_place};
  std::vector<LaunchedRank> ranks_;
};

void LaunchedRanks::start(const std::function<std::string()>& function) {
  // Flush, because otherwise each rank would also print the parent's buffered text.
  std::cout.flush();
  std::fflush(nullptr);
  const BlockedSignals until_started;
  for (int rank = 0; rank < options_.num_processes; ++rank) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0)
      throw Error(
          text("hvd::launch: cannot make a pipe for rank ", rank, ": ", std::strerror(errno)));
    const pid_t pid = ::fork();
    const int error = errno;
    if (pid == 0) {
      ::close(ends[0]);
      run_rank(rank, ends[1], function, until_started);
    }
    ::close(ends[1]);
    if (pid < 0) {
      ::close(ends[0]);
      throw Error(text("hvd::launch: cannot fork rank ", rank, " of ", options_.num_processes, ": ",
                       std::strerror(error)));
    }
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    ranks_.push_back({.pid = pid, .pipe = ends[0]});
  }
}

void LaunchedRanks::set_environment(int rank) const {
  const std::string number = std::to_string(rank);
  const std::string size = std::to_string(options_.num_processes);
  for (const char* const name : {"HVD_RANK", "HVD_LOCAL_RANK", "RANK", "LOCAL_RANK"})
    ::setenv(name, number.c_str(), 1);
  for (const char* const name : {"HVD_SIZE", "HVD_LOCAL_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})
    ::setenv(name, size.c_str(), 1);
  ::setenv("HVD_INIT_METHOD", ("file://" + folder_.path() + "/ranks").c_str(), 1);
  // A supervisor of hvdrun would mistake the rank's notices for those of the parent.
  ::unsetenv("HVD_LAUNCHER_NOTICES");
}

void write_message(int pipe, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(pipe, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

std::string error_message(const std::string& what, bool consequence) {
  const std::int64_t time = std::chrono::steady_clock::now().time_since_epoch().count();
  std::string message(1, kThrew);
  message.append(reinterpret_cast<const char*>(&time), sizeof time);
  return message + (consequence ? '1' : '0') + what;
}

void LaunchedRanks::run_rank(int rank, int pipe, const std::function<std::string()>& function,
                             const BlockedSignals& blocked) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent_) ::_exit(1);
  int code = 1;
  try {
    for (const LaunchedRank& other : ranks_) ::close(other.pipe);
    signals_.reset();
    blocked.unblock();
    launching.store(false);
    set_environment(rank);
    if (options_.allow_threads) {
      at::set_num_threads(1);
    } else if (::getenv("OMP_NUM_THREADS") == nullptr) {
      at::set_num_threads(std::max(
          1, static_cast<int>(std::thread::hardware_concurrency()) / options_.num_processes));
    }
    // set_num_threads() has started a thread pool, which LibTorch restarts after a fork, so a rank
    // may itself call launch().
    expected_threads = thread_names().size();
    write_message(pipe, kReturned + function());
    if (is_initialized()) shutdown();
    code = 0;
  } catch (const PeerLostError& error) {
    write_message(pipe, error_message(error.what(), true));
  } catch (const ShutdownError& error) {
    write_message(pipe, error_message(error.what(), true));
  } catch (const c10::Error& error) {
    write_message(pipe, error_message(error.what_without_backtrace(), false));
  } catch (const std::exception& error) {
    write_message(pipe, error_message(error.what(), false));
  } catch (...) {
    write_message(pipe, error_message("an exception that is not a std::exception", false));
  }
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(code);
}

void LaunchedRanks::read_message(LaunchedRank& rank) {
  std::array<char, 65536> bytes;
  while (rank.pipe >= 0) {
    const ssize_t got = ::read(rank.pipe, bytes.data(), bytes.size());
    if (got > 0) {
      rank.message.append(bytes.data(), static_cast<std::size_t>(got));
    } else if (got == 0 || (errno != EINTR && errno != EAGAIN)) {
      ::close(std::exchange(rank.pipe, -1));
    } else if (errno == EAGAIN) {
      return;
    }
  }
}

/// @param flags of waitpid()
void LaunchedRanks::reap(LaunchedRank& rank, int flags) {
  int status = 0;
  pid_t reaped = 0;
  do {
    reaped = ::waitpid(rank.pid, &status, flags);
  } while (reaped < 0 && errno == EINTR);
  if (reaped == 0) return;
  // A program that ignores SIGCHLD, or waits for all children, has already taken the status.
  if (reaped == rank.pid) rank.status = status;
  rank.pid = 0;
  rank.end = std::chrono::steady_clock::now();
  read_message(rank);
  // A process that the function has started may keep the pipe open.
  if (rank.pipe >= 0) ::close(std::exchange(rank.pipe, -1));
}

void LaunchedRanks::poll_until(SteadyTime deadline) {
  std::vector<pollfd> polled{{.fd = signals_->wake_descriptor(), .events = POLLIN, .revents = 0}};
  for (const LaunchedRank& rank : ranks_)
    if (rank.pipe >= 0) polled.push_back({.fd = rank.pipe, .events = POLLIN, .revents = 0});
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  // The end of a process whose pipe is closed, or open elsewhere, is detected at the next poll.
  const bool closed = polled.size() <= static_cast<std::size_t>(options_.num_processes);
  const auto pause = std::clamp<std::int64_t>(left.count(), 0, closed ? 2 : 50);
  ::poll(polled.data(), polled.size(), static_cast<int>(pause));
  for (LaunchedRank& rank : ranks_) {
    read_message(rank);
    if (rank.pid > 0) reap(rank, WNOHANG);
  }
}

void LaunchedRanks::send_signal(int number) {
  for (LaunchedRank& rank : ranks_) {
    if (rank.pid <= 0) continue;
    rank.stopped = true;
    ::kill(rank.pid, number);
  }
}

int LaunchedRanks::wait() {
  SteadyTime deadline = SteadyTime::max();
  int interrupted_by = 0;
  std::optional<int> next_signal;  // for the ranks that still run at the deadline
  while (any_running()) {
    poll_until(std::min(deadline, std::chrono::steady_clock::now() + std::chrono::seconds(1)));
    const SteadyTime now = std::chrono::steady_clock::now();
    if (const int number = signals_->take(); number != 0) {
      send_signal(interrupted_by == 0 ? number : SIGKILL);
      interrupted_by = number;
      next_signal = SIGKILL;
      deadline = now + options_.grace;
    }
    const bool failed = std::any_of(ranks_.begin(), ranks_.end(), [](const LaunchedRank& rank) {
      return rank.pid == 0 && !returned(rank);
    });
    if (failed && !next_signal) {
      next_signal = SIGTERM;
      deadline = now + options_.grace;
    }
    if (next_signal && now >= deadline) {
      send_signal(*next_signal);
      next_signal = SIGKILL;
      deadline = now + options_.grace;
    }
  }
  // A signal during the last poll.
  if (const int number = signals_->take(); number != 0) interrupted_by = number;
  signals_.reset();
  return interrupted_by;
}

/// Describes how a rank without a complete result has ended.
std::string failure_of(const LaunchedRank& rank) {
  constexpr std::size_t kTextBegin = 1 + sizeof(std::int64_t) + 1;
  if (rank.message.starts_with(kThrew) && rank.message.size() >= kTextBegin)
    return " failed: " + rank.message.substr(kTextBegin);
  if (rank.status && WIFSIGNALED(*rank.status)) {
    const int number = WTERMSIG(*rank.status);
    return text(" was killed by signal ", number, " (", ::strsignal(number), ")");
  }
  const std::string when = rank.message.starts_with(kReturned)
                               ? " after its function had returned, in hvd::shutdown()"
                               : " before its function returned; expected it to return or to throw";
  if (!rank.status) return " ended" + when;
  return text(" ended with exit code ", WEXITSTATUS(*rank.status), when);
}

std::vector<std::string> LaunchedRanks::results() const {
  struct Failure {
    bool consequence;  ///< of another rank's failure, or of the parent's signal
    SteadyTime time;
    int rank;
    auto operator<=>(const Failure&) const = default;
  };
  std::optional<Failure> first;
  int failed = 0;
  for (int r = 0; r < options_.num_processes; ++r) {
    const LaunchedRank& rank = ranks_[static_cast<std::size_t>(r)];
    if (returned(rank)) continue;
    ++failed;
    Failure failure{rank.stopped, rank.end, r};
    std::int64_t time = 0;
    if (rank.message.starts_with(kThrew) && rank.message.size() > 1 + sizeof time) {
      std::memcpy(&time, rank.message.data() + 1, sizeof time);
      failure.time = SteadyTime(SteadyTime::duration(time));
      failure.consequence = rank.message[1 + sizeof time] == '1';
    }
    if (!first || failure < *first) first = failure;
  }
  if (!first) {
    std::vector<std::string> all;
    for (const LaunchedRank& rank : ranks_) all.push_back(rank.message.substr(1));
    return all;
  }
  const LaunchedRank& rank = ranks_[static_cast<std::size_t>(first->rank)];
  std::string error = text("hvd::launch: rank ", first->rank, failure_of(rank));
  if (failed == 2) error += " (and 1 more rank failed or was ended)";
  if (failed > 2) error += text(" (and ", failed - 1, " more ranks failed or were ended)");
  const bool threw = rank.message.starts_with(kThrew);
  const bool killed = !threw && rank.status && WIFSIGNALED(*rank.status);
  throw RankError(error, first->rank, killed ? WTERMSIG(*rank.status) : 0);
}

/// Sets `launching` for a scope.
class LaunchScope {
 public:
  LaunchScope() {
    if (launching.exchange(true)) {
      throw UsageError(
          "hvd::launch: another thread of this process is in launch(); expected one at a time");
    }
  }
  LaunchScope(const LaunchScope&) = delete;
  LaunchScope& operator=(const LaunchScope&) = delete;
  ~LaunchScope() { launching.store(false); }
};

}  // namespace

std::vector<std::string> launch_ranks(const LaunchOptions& options,
                                      const std::function<std::string()>& function) {
  check_launch(options);
  const LaunchScope scope;
  int interrupted_by = 0;
  std::vector<std::string> results;
  {
    LaunchedRanks ranks(options);
    ranks.start(function);
    interrupted_by = ranks.wait();
    if (interrupted_by == 0) results = ranks.results();
  }
  if (interrupted_by == 0) return results;
  // The folder is removed and the program's own action is installed again.
  ::raise(interrupted_by);
  throw Error(text("hvd::launch: interrupted by signal ", interrupted_by, " (",
                   ::strsignal(interrupted_by), "); its ranks have ended"));
}

}  // namespace hvd::libtorch
