#pragma once

#include <sys/types.h>

#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mpirun/job_folder.h"
#include "system/unique_fd.h"

namespace hvd::launcher::test {

struct Result {
  int code = -1;  ///< -1: killed, because it did not end in time
  std::string out, err;
  double seconds = 0;
};

struct Start {
  std::vector<std::string> arguments = {};
  std::vector<std::pair<std::string, std::optional<std::string>>> environment =
      {};                                ///< changes; no value: removes the variable
  std::string input = {};                ///< for stdin; at most what a pipe holds
  bool terminal = false;                 ///< stdout is a pseudo-terminal
  std::vector<std::string> prefix = {};  ///< a command that runs hvdrun
  std::string program = {};              ///< runs instead of hvdrun, for a comparison
};

/// A running hvdrun in a process group of its own, with a TMPDIR of its own. Not thread-safe. The
/// destructor kills the processes that still run. LAUNCHER_TEST_CONTROLLER in the environment
/// selects the controller unless the arguments do.
class HvdrunProcess {
 public:
  explicit HvdrunProcess(const Start& start);
  HvdrunProcess(const HvdrunProcess&) = delete;
  HvdrunProcess& operator=(const HvdrunProcess&) = delete;
  ~HvdrunProcess();

  pid_t pid() const noexcept { return pid_; }
  void signal(int number) const;
  /// Signals the whole process group, as a terminal's Ctrl-C does.
  void signal_group(int number) const;
  /// Reads until stdout and stderr together contain `text` `count` times.
  bool wait_for(const std::string& text, int count, double timeout_s = 60);
  Result wait(double timeout_s = 30);
  const std::string& out() const noexcept { return out_; }

 private:
  void read_some(int timeout_ms);

  const TemporaryFolder temporary_;  ///< hvdrun's TMPDIR: a killed hvdrun cannot clean up
  pid_t pid_ = -1;
  long long started_ns_ = 0;
  UniqueFd stdout_, stderr_;
  std::string out_, err_;
};

/// A file for which the workers of an elastic job wait before they end. A test makes it when it has
/// observed what it waits for, however long that takes.
class Gate {
 public:
  std::string path() const { return folder_.path() / "end"; }
  void open() const { std::ofstream(path()).close(); }

 private:
  const TemporaryFolder folder_;
};

/// Runs hvdrun to its end.
Result run_hvdrun(const std::vector<std::string>& arguments, double timeout_s = 30);
/// Paths of the programs beside this file.
std::string rank_program();
/// Linked with the MPI under whose mpiexec the test runs: HVD_TEST_MPIEXEC.
std::string mpi_program();
std::string hvdrun();
/// A word that does not occur on the command line of any other process.
std::string unique_marker();
/// The processes, except zombies, that have `marker` on their command line.
std::vector<pid_t> processes_with(const std::string& marker);
/// The agents that an hvdrun has started, also through a remote shell that is simulated here.
std::vector<pid_t> agents_of(pid_t hvdrun);
/// The process of a worker of programs/worker_program.cpp that has printed this; -1: it has printed
/// nothing.
pid_t pid_of_worker(int worker, const std::string& out);
/// The agent of a host on which such a worker has printed that it runs; -1: none has.
pid_t agent_of_host(int host, const HvdrunProcess& hvdrun);
/// Waits until none of the processes exists. Returns those that are left after the time.
std::vector<pid_t> wait_until_gone(std::vector<pid_t> processes, double timeout_s = 10);
/// Waits until no process is left, and returns the remaining ones after a time limit.
std::vector<pid_t> wait_until_gone(const std::string& marker, double timeout_s = 10);
int count(const std::string& text, const std::string& part);
/// The complete lines of `text`.
std::vector<std::string> lines_of(const std::string& text);

}  // namespace hvd::launcher::test
