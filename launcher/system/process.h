#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "system/unique_fd.h"

namespace hvd::launcher {

struct Pipe {
  UniqueFd read_end, write_end;
};
/// Makes a pipe. Both ends close on exec. @throws LaunchError (kInternal).
Pipe make_pipe();

struct SpawnOptions {
  std::vector<std::string> argv;                      ///< argv[0] is looked up in PATH
  std::vector<std::string> environment;               ///< NAME=value, the whole environment
  int stdin_fd = -1, stdout_fd = -1, stderr_fd = -1;  ///< -1: the caller's own
  int parent_death_signal = 0;  ///< sent to the child when the calling thread's process dies
  bool own_process_group = false;
  int inherited_fd = -1;             ///< stays open in the child, with the same number; -1: none
  std::vector<int> cpus;             ///< the child is bound to these; empty: as the caller
  std::vector<int> blocked_signals;  ///< all others are unblocked in the child
};

/// Binds this process and its later children to these CPUs. No effect for an empty list, or if the
/// system refuses.
void bind_to(const std::vector<int>& cpus);

struct SpawnResult {
  pid_t pid = -1;
  int error = 0;  ///< errno of the exec that failed; the child is reaped already
};

/// Forks and executes; returns after the exec has succeeded or failed. Call it from a process with
/// one thread.
/// @throws LaunchError (kInternal) when the process cannot be made.
SpawnResult spawn(const SpawnOptions& options);
/// Like spawn(), for a program that must run.
/// @param advice ends the error text, as in "; expected mpirun in PATH"
/// @throws LaunchError (kNotFound, kCannotRun) also when the program cannot be executed.
pid_t start_process(const SpawnOptions& options, const std::string& advice);
/// Replaces this process. Returns errno if the program, which is looked up in PATH, cannot be
/// executed.
int execute(const std::vector<std::string>& argv, const std::vector<std::string>& environment);

/// How a process ended.
struct ExitStatus {
  int code = 0;    ///< the exit code, or 128 + signal
  int signal = 0;  ///< 0: it exited by itself
  bool dumped_core = false;
};
/// How `pid` ended, if it has. Does not reap it, so that no other process group can get its number.
std::optional<ExitStatus> peek_exit(pid_t pid);
/// Reaps `pid` if it has ended.
std::optional<ExitStatus> try_wait(pid_t pid);
/// Waits for the end of the child `pid` and reaps it.
ExitStatus wait_for(pid_t pid);

/// The process's environment, as `NAME=value`.
std::vector<std::string> current_environment();
/// A variable of this process; empty if it is unset.
std::optional<std::string> environment_variable(const char* name);
/// Sets, replaces or (no value) removes a variable.
void set_variable(std::vector<std::string>& environment, const std::string& name,
                  const std::optional<std::string>& value);

/// The file that is run for a program: the program itself if its name contains a slash, otherwise
/// the first executable of that name in PATH.
struct ProgramSearch {
  std::string path;
  bool found = false, executable = false;
};
ProgramSearch find_program(const std::string& program);

/// Absolute path of the running executable.
std::string own_executable();
std::string own_hostname();
void set_nonblocking(int fd);
/// Allows this process and its children `needed` file descriptors, as far as the hard limit does.
/// @throws LaunchError (kUnavailable) if it does not; the text contains `where` and `for_what`
void raise_descriptor_limit(std::size_t needed, const std::string& where,
                            const std::string& for_what);
/// Nanoseconds since the epoch.
long long realtime_ns();

/// The living processes of a process group.
std::vector<pid_t> group_members(pid_t group);

/// Whether a process has a handler for a signal, so that the signal does not end it.
bool handles(pid_t process, int signal);

}  // namespace hvd::launcher
