#include "mpirun/supervisor.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "agent/agent.h"
#include "agent/core_share.h"
#include "base/sha256.h"
#include "base/text.h"
#include "mpirun/job_folder.h"
#include "system/error.h"
#include "system/process.h"
#include "system/unique_fd.h"

// Note [Two processes per rank]
//
// mpirun ends a job (MPI_Abort; a rank that left without MPI_Finalize) with SIGTERM and, since
// odls_base_sigkill_timeout is 0, SIGKILL right behind it. A supervisor killed this way could not
// report how its program ended, and with a longer timeout mpirun would always sleep for the whole
// timeout. Therefore mpirun starts a front process, which only waits. The actual supervisor is the
// front's child, in a separate process group. It outlives the front, treats the front's death as
// mpirun's request to stop the rank, and still reports.
//
//   mpirun -- front -- supervisor (own group) -- program (own group)
//
// When hvdrun, the front or the supervisor dies, the kernel signals its child (PR_SET_PDEATHSIG).
// Across hosts, and when hvdrun itself dies, the end of the TCP connection stops the supervisors.

namespace hvd::launcher {
namespace {

constexpr const char* kSharedMemory = "/dev/shm";
constexpr const char* kSharedPrefix = "hvdrun-";

int supervise(const AgentJob& job) {
  if (job.ranks.front().local_rank == 0) {
    remove_abandoned(kSharedMemory, kSharedPrefix);
    remove_stale_segments(kSharedMemory);
  }
  // The name is the same for all ranks of the job on this host, and must not reveal the token.
  const auto shared = JobFolder::join(
      text(kSharedMemory, "/", kSharedPrefix,
           hmac_hex(*environment_variable(kTokenVariable), "folder").substr(0, 16)));
  AgentJob with_folder = job;
  if (shared) {
    with_folder.add_variables = [&shared](std::vector<std::string>& environment) {
      put_segments_into(environment, shared->path());
    };
  }
  return run_ranks(with_folder);
}

/// Replaces this process by the program.
int become_program(const AgentJob& job) {
  const CoreShare share = find_shares(job.ranks, true).front();
  bind_to(share.cpus);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  const int error = execute(
      job.program, rank_environment(current_environment(), job.ranks.front(), share.threads));
  std::fprintf(stderr, "hvdrun: cannot run '%s': %s\n", job.program[0].c_str(),
               std::strerror(error));
  return static_cast<int>(error == ENOENT ? ExitCode::kNotFound : ExitCode::kCannotRun);
}

/// Makes this process and its children read end of file.
void close_input() {
  const UniqueFd empty(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (empty) ::dup2(empty.get(), STDIN_FILENO);
}

/// The front process, which is mpirun's direct child: passes the signals that it receives on to the
/// supervisor, and ends with the supervisor's exit code.
int wait_as_front(pid_t supervisor, const sigset_t& signals) {
  while (true) {
    const int signal = ::sigwaitinfo(&signals, nullptr);
    if (signal > 0 && signal != SIGCHLD) ::kill(supervisor, signal);
    if (const auto ended = try_wait(supervisor)) return ended->code;
  }
}

}  // namespace

int run_supervisor(const std::vector<std::string>& program) {
  const AgentJob job = {
      .program = program, .ranks = {identify_rank(environment_variable)}, .under_mpirun = true};
  const int rank = job.ranks.front().rank;
  if (!environment_variable(kTokenVariable)) return become_program(job);

  const sigset_t signals = block_agent_signals();
  // Hydra leaves the input of all ranks but 0 open. Open MPI closes it, or forwards hvdrun's.
  if (rank != 0 && !environment_variable("OMPI_COMM_WORLD_RANK")) close_input();
  const pid_t front = ::getpid();
  const pid_t supervisor = ::fork();
  if (supervisor < 0) {
    std::fprintf(stderr, "hvdrun: rank %d: fork: %s\n", rank, std::strerror(errno));
    return static_cast<int>(ExitCode::kInternal);
  }
  if (supervisor > 0) return wait_as_front(supervisor, signals);

  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != front) return static_cast<int>(ExitCode::kInternal);
  return supervise(job);
}

}  // namespace hvd::launcher
