#include "processes/supervisor.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/cpu_quota.h"
#include "base/sha256.h"
#include "base/text.h"
#include "command/controller.h"
#include "command/rank_environment.h"
#include "processes/core_share.h"
#include "processes/job_folder.h"
#include "processes/rank_supervisor.h"
#include "reports/program_sockets.h"
#include "reports/report.h"
#include "system/error.h"
#include "system/process.h"
#include "system/socket.h"
#include "system/unique_fd.h"

// Note [Two processes per rank]
//
// mpirun ends a job (MPI_Abort; a rank that left without MPI_Finalize) with SIGTERM and, since
// odls_base_sigkill_timeout is 0, SIGKILL right behind it. A supervisor killed this way could not
// report how its program ended, and with a longer timeout mpirun would always sleep for the whole
// timeout. Therefore mpirun starts a front process, which only waits. The actual supervisor is the
// front's child, in a process group of its own. It outlives the front, treats the front's death as
// mpirun's request to stop the rank, and still reports.
//
//   mpirun -- front -- supervisor (own group) -- program (own group)
//
// When hvdrun, the front or the supervisor dies, the kernel signals its child (PR_SET_PDEATHSIG).
// Across hosts, and when hvdrun itself dies, the end of the TCP connection stops the supervisors.

// Note [Rendezvous under hvdrun]
//
// Without MPI, hvd's ranks find each other through their supervisors, which are connected to hvdrun
// anyway. hvdrun serves the rendezvous (RankRendezvous), and each supervisor passes on the bytes
// (RendezvousSocket). The rendezvous needs no further port, and no connection between the ranks'
// hosts.
//
// Other programs read MASTER_ADDR and MASTER_PORT, and rank 0 serves there. The port must be free
// on rank 0's host, and must stay free until the program listens on it. Therefore the supervisor of
// rank 0 binds a port without listen() and keeps it bound. The system does not give this port to
// another process, but a program that sets SO_REUSEADDR, as LibTorch and servers in general do, can
// listen on it repeatedly. A client that connects too early is refused and tries again. The
// supervisor sends the port number to hvdrun in the hello frame, and hvdrun sends it to all
// supervisors in the start frame. Hence no program starts before all supervisors have connected.
//
// MASTER_ADDR is an address that has already worked. If rank 0 is on hvdrun's host, it is the
// address at which a supervisor has reached hvdrun; otherwise it is the address from which rank 0's
// supervisor has connected.

namespace hvd::launcher {
namespace {

constexpr int kConnectTimeoutMs = 5'000;
/// hvdrun replies after it has started all ranks, which takes about 20 ms for each rank if they
/// share cores.
constexpr int kIntroductionTimeoutMs = 30'000;
constexpr int kConnectAttempts = 3;
constexpr const char* kSharedMemory = "/dev/shm";
constexpr const char* kSharedPrefix = "hvdrun-";

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

std::vector<std::string> words_of(std::string_view list) {
  const auto parts = split_text(list, ',');
  return {parts.begin(), parts.end()};
}

/// The cores and threads of this rank. With Bind::kNone, only the number of threads is used. If
/// mpirun binds the ranks, the affinity mask already is the rank's share.
CoreShare find_share(const RankIdentity& identity) {
  const Bind bind = parse_bind(variable(kBindVariable).value_or("none")).value_or(Bind::kNone);
  const bool binds = bind == Bind::kAuto || (bind != Bind::kNone && variable(kRankVariable));
  if (!binds && variable("OMP_NUM_THREADS")) return {};
  const std::vector<int> allowed = allowed_cpus();
  const std::vector<Core> cores = usable_cores(allowed);
  const auto quota = cpu_quota();
  CoreShare share;
  if (bind == Bind::kAuto || bind == Bind::kNone) {
    share = share_of(cores, identity.local_rank, identity.local_size, quota);
    if (bind == Bind::kNone) share.cpus.clear();
    return share;
  }
  if (variable(kRankVariable))
    return placed_share(bind, cores, identity.local_rank, identity.local_size);
  share.threads =
      default_omp_threads(bind, static_cast<int>(cores.size()),
                          static_cast<int>(usable_cores({}).size()), identity.local_size);
  return share;
}

std::optional<LauncherConnection> try_connect(const std::vector<std::string>& addresses,
                                              std::uint16_t port, const Hello& hello) {
  for (UniqueFd& fd : connect_any(addresses, port, kConnectTimeoutMs)) {
    tune_connection(fd.get(), silence_limit_ms(variable(kPeerTimeoutVariable)));
    auto connection = introduce(std::move(fd), hello, variable(kTokenVariable).value_or(""),
                                hello.host == variable(kHostVariable), kIntroductionTimeoutMs);
    if (connection) return connection;
  }
  return std::nullopt;
}

/// Tries loopback only if this host has the name of hvdrun's host. On another host a different
/// program may listen on that port.
std::optional<LauncherConnection> connect_to_launcher(const Hello& hello) {
  const std::string addresses = variable(kAddressesVariable).value_or("");
  const auto port = parse_number<std::uint16_t>(variable(kPortVariable).value_or("")).value_or(0);
  for (int attempt = 0; attempt < kConnectAttempts; ++attempt) {
    if (hello.host == variable(kHostVariable)) {
      if (auto connection = try_connect({"127.0.0.1"}, port, hello)) return connection;
    }
    if (auto connection = try_connect(words_of(addresses), port, hello)) return connection;
    ::usleep(200'000);
  }
  std::fprintf(stderr,
               "hvdrun: rank %d on %s cannot reach hvdrun on %s, port %u; tried %s. Every host "
               "must be able to open a TCP "
               "connection to the one that runs hvdrun: check its firewall and routes.\n",
               hello.rank, hello.host.c_str(), variable(kHostVariable).value_or("?").c_str(),
               unsigned{port}, addresses.empty() ? "127.0.0.1" : addresses.c_str());
  return std::nullopt;
}

bool starts_without_mpi() { return variable(kControllerVariable) == text(Controller::kUcx); }

int supervise(const std::vector<std::string>& program, const RankIdentity& identity) {
  const CoreShare share = find_share(identity);
  const int omp_threads = variable("OMP_NUM_THREADS") ? 0 : share.threads;
  Hello hello;
  hello.rank = identity.rank;
  hello.size = identity.size;
  hello.local_rank = identity.local_rank;
  hello.local_size = identity.local_size;
  hello.host = own_hostname();
  hello.supervisor_pid = ::getpid();
  hello.omp_threads = omp_threads;
  hello.bound_cpus = static_cast<int>(share.cpus.size());
  // Keeps the port as long as the rank runs: see Note [Rendezvous under hvdrun].
  Listener master;
  if (identity.rank == 0) {
    master = reserve_port();
    hello.master_port = master.port;
  }
  std::optional<RendezvousSocket> rendezvous;
  if (starts_without_mpi()) rendezvous.emplace();
  const std::string init_method = rendezvous ? "hvdrun://" + rendezvous->name() : "";
  auto connection = connect_to_launcher(hello);
  if (!connection) return static_cast<int>(ExitCode::kUnavailable);

  if (identity.local_rank == 0) {
    remove_abandoned(kSharedMemory, kSharedPrefix);
    remove_stale_segments(kSharedMemory);
  }
  // The name is the same for all ranks of the job on this host, and must not reveal the token.
  const std::string folder = text(kSharedMemory, "/", kSharedPrefix,
                                  hmac_hex(*variable(kTokenVariable), "folder").substr(0, 16));
  const auto shared = starts_without_mpi() ? std::nullopt : JobFolder::join(folder);
  const auto make_environment = [&](const StartOrder& order) {
    std::vector<std::string> environment =
        rank_environment(current_environment(), identity, omp_threads);
    if (shared) put_segments_into(environment, shared->path());
    add_job_variables(environment, order, init_method, *variable(kTokenVariable),
                      words_of(variable(kExportsVariable).value_or("")));
    return environment;
  };
  RankSupervisor supervisor(std::move(*connection), std::move(rendezvous),
                            variable(kOutputTtyVariable) == "1");
  return supervisor.run(program, make_environment, share.cpus);
}

int become_program(const std::vector<std::string>& program, const RankIdentity& identity) {
  const CoreShare share = find_share(identity);
  bind_to(share.cpus);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  const int error =
      execute(program, rank_environment(current_environment(), identity,
                                        variable("OMP_NUM_THREADS") ? 0 : share.threads));
  std::fprintf(stderr, "hvdrun: cannot run '%s': %s\n", program[0].c_str(), std::strerror(error));
  return static_cast<int>(error == ENOENT ? ExitCode::kNotFound : ExitCode::kCannotRun);
}

/// Lets this process and its children read end of file. Hydra leaves the input of all ranks but 0
/// open.
void close_input() {
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (nothing) ::dup2(nothing.get(), STDIN_FILENO);
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

void add_job_variables(std::vector<std::string>& environment, const StartOrder& order,
                       const std::string& init_method, std::string_view token,
                       const std::vector<std::string>& kept) {
  const auto set = [&](const std::string& name, const std::optional<std::string>& value) {
    if (std::find(kept.begin(), kept.end(), name) == kept.end())
      set_variable(environment, name, value);
  };
  set("GROUP_RANK", text(order.node));
  set("GROUP_WORLD_SIZE", text(order.nodes));
  set("HOROVOD_CROSS_RANK", text(order.cross_rank));
  set("HOROVOD_CROSS_SIZE", text(order.cross_size));
  if (order.master_port > 0) {
    set("MASTER_ADDR", order.address);
    set("MASTER_PORT", text(order.master_port));
  }
  // hvdrun may itself be a child of a rank or of mpirun, whose variables do not apply to this job.
  if (init_method.empty()) {
    for (const char* name : {"HVD_INIT_METHOD", "HVD_JOB_NAME", "HVD_JOB_TOKEN"})
      set(name, std::nullopt);
    return;
  }
  set("HVD_INIT_METHOD", init_method);
  set("HVD_JOB_NAME", job_name(token));
  set("HVD_JOB_TOKEN", job_token(token));
  for (const std::string_view prefix : {"OMPI_COMM_WORLD_", "PMIX_", "PMI_"}) {
    std::erase_if(environment,
                  [&](const std::string& variable) { return variable.starts_with(prefix); });
  }
}

int run_supervisor(const std::vector<std::string>& program) {
  const RankIdentity identity = identify_rank(variable);
  if (!variable(kTokenVariable)) return become_program(program, identity);

  const sigset_t signals = supervised_signals();
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  if (variable(kRankVariable)) return supervise(program, identity);
  if (identity.rank != 0) close_input();
  const pid_t front = ::getpid();
  const pid_t supervisor = ::fork();
  if (supervisor < 0) {
    std::fprintf(stderr, "hvdrun: rank %d: fork: %s\n", identity.rank, std::strerror(errno));
    return static_cast<int>(ExitCode::kInternal);
  }
  if (supervisor > 0) return wait_as_front(supervisor, signals);

  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != front) return static_cast<int>(ExitCode::kInternal);
  return supervise(program, identity);
}

}  // namespace hvd::launcher
