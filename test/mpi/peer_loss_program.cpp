#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "hvd/error.h"
#include "mpi/support/hanging_mpi.h"
#include "mpi/support/mpi_test.h"
#include "support/mpi_variables.h"
#include "transport/mpi/environment.h"
#include "transport/mpi/mpi_world.h"

// One rank of peer_loss_test. The first argument selects how the last rank is lost: kill, stop,
// exit (in the middle of the job), absent (it does not join), init-kill (inside MPI_Init),
// begin-kill (after it has joined and before the job begins), begin-kill-late (the same, and the
// next rank reaches the exchange after rank 0 has ended), begin-late (it misses rank 0's deadline),
// hang (a call of MPI does not return), unfinalised (it leaves in order and does not finalise MPI)
// or pipe (no loss, but every rank gets a SIGPIPE). The others print "rank R lost K after M ms:
// CAUSE" or "rank R gave up: MESSAGE", and rank 0 prints "segments PREFIX", the prefix of the names
// in shared memory.

namespace {

using namespace std::chrono_literals;

constexpr auto kTimeout = 1s;

void be_lost(hvd::control::ControlPlane& plane, const std::string& how) {
  if (how == "kill") raise(SIGKILL);
  if (how == "stop") raise(SIGSTOP);
  if (how == "exit")
    std::exit(0);  // in the middle of the job: the exit must not wait for MPI_Finalize
  if (how != "hang") return;
  hvd::testing::hanging_mpi.improbe_returns = false;
  plane.poll();
}

int watch(hvd::control::ControlPlane& plane, const std::string& how, pid_t victim) {
  const hvd::SteadyClock clock;
  const hvd::TimePoint start = clock.now();
  const int last = plane.size() - 1;
  while (clock.now() - start < 20s) {
    plane.heartbeat(clock.now());
    if (plane.rank() == last && clock.now() - start > 300ms) be_lost(plane, how);
    const auto loss = plane.check_peers(clock.now(), kTimeout);
    if (loss) {
      const auto after =
          std::chrono::duration_cast<std::chrono::milliseconds>(clock.now() - start - 300ms)
              .count();
      std::printf("rank %d lost %d after %lld ms: %s\n", plane.rank(), loss->rank,
                  static_cast<long long>(after), loss->cause.c_str());
      std::fflush(stdout);
      // The others detect it before the job ends.
      std::this_thread::sleep_for(500ms);
      if (how == "stop" && plane.rank() == 0) kill(victim, SIGKILL);
      return 0;
    }
    std::this_thread::sleep_for(5ms);
  }
  std::printf("rank %d detected no loss\n", plane.rank());
  return 1;
}

int launcher_rank() { return hvd::testing::mpi_launcher_rank().value_or(-1); }

bool is_last() { return launcher_rank() == hvd::testing::mpi_launcher_size().value_or(-1) - 1; }

int give_up(const hvd::PeerLostError& error) {
  std::printf("rank %d gave up: %s\n", launcher_rank(), error.what());
  std::fflush(stdout);
  std::this_thread::sleep_for(500ms);  // the others detect it before the job ends
  return 0;
}

/// The last rank is killed while the others wait for it in an exchange of the start.
int be_killed_or_give_up(const hvd::mpi::MpiWorld& world) {
  if (is_last()) {
    std::this_thread::sleep_for(200ms);
    raise(SIGKILL);
  }
  std::vector<int> ranks(static_cast<std::size_t>(world.topology().size));
  try {
    world.allgather(&world.topology().rank, ranks.data(), sizeof(int), 30s);
  } catch (const hvd::PeerLostError& error) {
    return give_up(error);
  }
  return 1;
}

/// Rank 0 gives up in an exchange of the start and ends at once. Rank 1 finds both its end and the
/// cause.
int follow_rank_0(const hvd::mpi::MpiWorld& world, bool killed) {
  if (is_last()) {
    if (killed) raise(SIGKILL);
    std::this_thread::sleep_for(3s);
    hvd::mpi::mark_failed();
    return 0;
  }
  const bool first = launcher_rank() == 0;
  if (!first && killed) std::this_thread::sleep_for(1s);
  std::vector<int> ranks(static_cast<std::size_t>(world.topology().size));
  try {
    world.allgather(&world.topology().rank, ranks.data(), sizeof(int),
                    first && !killed ? 500ms : 30s);
  } catch (const hvd::PeerLostError& error) {
    std::printf("rank %d gave up: %s (lost rank %d)\n", launcher_rank(), error.what(),
                error.rank());
    std::fflush(stdout);
    _exit(0);
  }
  return 1;
}

/// All ranks leave in order. The others end by exit() while the last one does not finalise MPI.
int leave_without_finalising(hvd::control::ControlPlane& plane) {
  plane.farewell();
  if (!is_last()) return 0;
  std::this_thread::sleep_for(200ms);
  _Exit(0);
}

/// The last rank starts MPI and never joins.
int be_absent_or_give_up() {
  hvd::mpi::ensure_initialized();
  if (is_last()) {
    std::this_thread::sleep_for(2s);
    hvd::mpi::mark_failed();
    return 0;
  }
  try {
    hvd::mpi::MpiWorld::join({.start_timeout = 500ms});
  } catch (const hvd::PeerLostError& error) {
    return give_up(error);
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string how = argv[1];
  // Registered before MPI starts, so it runs after MPI_Finalize.
  if (how == "unfinalised")
    std::atexit([] { std::printf("rank %d finalised\n", launcher_rank()); });
  if (how == "absent") return be_absent_or_give_up();
  if (how == "init-kill" && is_last())
    hvd::testing::hanging_mpi.before_init = [] { raise(SIGKILL); };
  const auto world = hvd::mpi::MpiWorld::join(
      {.start_timeout = how == "init-kill" ? 1s : 10s, .call_timeout = 500ms});
  if (world->topology().rank == 0)
    std::printf("segments %s\n", world->node()->name_prefix().c_str());
  if (how == "begin-kill") return be_killed_or_give_up(*world);
  if (how == "begin-kill-late" || how == "begin-late")
    return follow_rank_0(*world, how == "begin-kill-late");
  // Without rings each poll() calls MPI.
  const auto plane = hvd::testing::mpi_control_plane(world, /*use_mail_rings=*/how != "hang");
  if (how == "unfinalised") return leave_without_finalising(*plane);
  if (how == "pipe") {
    raise(SIGPIPE);
    plane->farewell();
    std::printf("rank %d lives\n", plane->rank());
    return 0;
  }
  // The victim sends its pid to rank 0, which kills the stopped process at the end.
  pid_t victim = getpid();
  if (plane->rank() == plane->size() - 1) plane->send(0, std::as_bytes(std::span(&victim, 1)));
  if (plane->rank() == 0) {
    for (;;) {
      const auto message = plane->poll();
      if (!message) continue;
      std::memcpy(&victim, message->bytes.data(), sizeof victim);
      break;
    }
  }
  return watch(*plane, how, victim);
}
