#include "transport/mpi/environment.h"

#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "hvd/error.h"
#include "transport/mpi/call_watch.h"
#include "transport/mpi/finalize_watch.h"

// Note [SIGPIPE]
// When the process at the other end of a connection dies, Open MPI may write to the connection once
// more. The default action of SIGPIPE would then end this process, so a healthy rank would die
// silently because another one did. With any handler the write returns an error instead. This
// handler is empty; SIG_IGN would be inherited by programs that this one starts. A handler of the
// program's own is kept.

namespace hvd::mpi {
namespace {

void outlive_broken_connections() {
  struct sigaction current {};
  if (::sigaction(SIGPIPE, nullptr, &current) != 0 || (current.sa_flags & SA_SIGINFO) != 0 ||
      current.sa_handler != SIG_DFL)
    return;
  struct sigaction ours {};
  ours.sa_handler = [](int) {};
  ours.sa_flags = SA_RESTART;
  ::sigemptyset(&ours.sa_mask);
  ::sigaction(SIGPIPE, &ours, nullptr);
}

struct ProcessState {
  Mutex mutex;  ///< held while MPI is started
  std::atomic<bool> initialized_here{false};
  std::atomic<pid_t> process{0};  ///< the process that started MPI, to recognise a forked child
  std::atomic<bool> warned{false};
  std::atomic<bool> failed{false};
  std::atomic<int> open_worlds{0};
  Mutex neighbours_mutex;
  std::vector<ProcessIdentity> neighbours HVD_GUARDED_BY(neighbours_mutex);
};

// Never destroyed: the exit handler and destructors of static objects use it in any order.
ProcessState& process_state() {
  static auto* const state = new ProcessState;
  return *state;
}

int provided_level() noexcept {
  int level = MPI_THREAD_SINGLE;
  if (!is_active() || MPI_Query_thread(&level) != MPI_SUCCESS) return MPI_THREAD_SINGLE;
  return level;
}

void finalize_at_exit(int exit_code, void*) {
  ProcessState& state = process_state();
  // A child made by fork() inherits this handler and the state of MPI, but the connections belong
  // to its parent.
  if (state.process != ::getpid()) return;
  if (!is_active() || state.failed || state.open_worlds > 0) return;
  std::vector<ProcessIdentity> neighbours;
  {
    const MutexLock lock(state.neighbours_mutex);
    neighbours = state.neighbours;
  }
  const FinalizeWatch watch(neighbours, exit_code);
  MPI_Finalize();
}

void initialize() {
  setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", /*overwrite=*/0);
  setenv("OMPI_MCA_mpi_yield_when_idle", "1", /*overwrite=*/0);
  int provided = MPI_THREAD_SINGLE;
  const WatchedCall watched("MPI_Init_thread");
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  process_state().initialized_here = true;
  process_state().process = ::getpid();
  // Registered after MPI has started, so it runs before MPI's own exit handlers.
  if (::on_exit(finalize_at_exit, nullptr) != 0) {
    HVD_LOG(kWarning) << "on_exit() refused a handler: MPI_Finalize will not be called at exit";
  }
}

}  // namespace

void ensure_initialized() {
  ProcessState& state = process_state();
  const MutexLock lock(state.mutex);
  outlive_broken_connections();
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized) {
    throw UsageError(
        "init: this process has already called MPI_Finalize and MPI cannot start twice; call "
        "hvd::init() before it");
  }
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (!initialized) initialize();
  if (!threads_multiple() && !state.warned.exchange(true)) {
    HVD_LOG(kWarning)
        << "MPI provides " << thread_level_name()
        << ", not MPI_THREAD_MULTIPLE: hvd makes its own MPI calls one at a "
        << "time, but from its own threads; the program must not call MPI while hvd is "
           "initialised. "
        << "Call MPI_Init_thread with MPI_THREAD_MULTIPLE, or let hvd::init() start MPI";
  }
}

bool is_active() noexcept {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized && !finalized;
}

bool initialized_by_hvd() noexcept { return process_state().initialized_here; }

bool threads_multiple() noexcept { return provided_level() == MPI_THREAD_MULTIPLE; }

std::string_view thread_level_name() noexcept {
  switch (provided_level()) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    case MPI_THREAD_MULTIPLE:
      return "MPI_THREAD_MULTIPLE";
    default:
      return "an unknown thread level";
  }
}

std::string library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING + 1] = {};
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS || length <= 0) return "unknown";
  const std::string_view all(text);
  // MPICH aligns its lines with blanks.
  std::string line;
  for (const char letter : all.substr(0, all.find_first_of(",\n"))) {
    const bool blank = letter == ' ' || letter == '\t';
    if (!blank) line += letter;
    if (blank && !line.ends_with(' ')) line += ' ';
  }
  return line;
}

void mark_failed() noexcept { process_state().failed = true; }
bool has_failed() noexcept { return process_state().failed; }
void set_neighbours(std::vector<ProcessIdentity> neighbours) {
  ProcessState& state = process_state();
  const MutexLock lock(state.neighbours_mutex);
  state.neighbours = std::move(neighbours);
}
void world_opened() noexcept { ++process_state().open_worlds; }
void world_closed() noexcept { --process_state().open_worlds; }

}  // namespace hvd::mpi
