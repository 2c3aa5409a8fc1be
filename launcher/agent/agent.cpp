#include "agent/agent.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <asio/io_context.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include "agent/core_share.h"
#include "agent/elastic_agent.h"
#include "agent/host_order.h"
#include "agent/job_variables.h"
#include "agent/launcher_connection.h"
#include "agent/rank_process.h"
#include "base/text.h"
#include "system/error.h"
#include "system/event_loop.h"
#include "system/process.h"
#include "system/socket.h"

// Note [Rendezvous under hvdrun]
//
// Without MPI, hvd's ranks find each other through their agents, which are connected to hvdrun
// anyway. hvdrun serves the rendezvous (RankRendezvous), and each agent passes on the bytes
// (RendezvousSocket). The rendezvous needs no further port, and no connection between the ranks'
// hosts.
//
// Other programs read MASTER_ADDR and MASTER_PORT, and rank 0 serves there. The port must be free
// on rank 0's host, and must stay free until the program listens on it. Therefore the agent of rank
// 0 binds a port without listen() and keeps it bound. The system does not give this port to another
// process, but a program that sets SO_REUSEADDR, as LibTorch and servers in general do, can listen
// on it repeatedly. A client that connects too early is refused and tries again. The agent sends
// the port number to hvdrun in the hello frame, and hvdrun sends it to all agents in the start
// frames. Hence no program starts before all agents have connected.
//
// MASTER_ADDR is an address that has already worked. If rank 0 is on hvdrun's host, it is the
// address at which an agent has reached hvdrun; otherwise it is the address from which rank 0's
// agent has connected.

namespace hvd::launcher {
namespace {

constexpr int kOrderTimeoutMs = 60'000;
/// While more bytes than this are queued for hvdrun, the programs' rendezvous waits.
constexpr std::size_t kMaxUnsent = 1 << 20;
/// The descriptors of an agent: its own, and those of each rank (two pipes, two sockets, and two
/// for each process that is in the rendezvous).
constexpr std::size_t kOwnDescriptors = 24, kDescriptorsOfARank = 8;

constexpr std::array kHandled = {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

std::vector<std::string> words_of(std::string_view list) {
  const auto parts = split_text(list, ',');
  return {parts.begin(), parts.end()};
}

/// Runs the programs of one agent.
class Agent final : public RankProcess::Link {
 public:
  explicit Agent(const AgentJob& job);
  int run();

 private:
  void send(FrameType type, int rank, std::string_view payload) override;
  bool has_room() const override { return frames_ && frames_->unsent() < kMaxUnsent; }

  RankProcess::Program program_of(const RankIdentity& identity, const CoreShare& share) const;
  std::vector<std::string> environment(const RankIdentity& identity, int omp_threads,
                                       StartOrder order, const std::string& init_method) const;
  bool connect();
  void on_signal(int signal);
  bool on_frame(const Frame& frame);
  void on_connection_lost();
  RankProcess* find(int rank);
  void set_alarm();
  /// Handles what is due. Returns whether all ranks are done.
  bool step();

  const AgentJob& job_;
  const std::string token_ = environment_variable(kTokenVariable).value_or("");
  asio::io_context io_{1};
  Alarm alarm_{io_};
  SignalReader signals_;
  const UniqueFd no_input_{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  asio::ip::tcp::acceptor master_port_{io_};
  Hello hello_;
  std::shared_ptr<FrameConnection> frames_;  ///< null before the welcome and after a loss
  std::vector<std::unique_ptr<RankProcess>> running_;
  std::vector<std::unique_ptr<RankProcess>> done_;
  int code_ = 0;
  bool connecting_ = false;
  int early_signal_ = 0;  ///< a request to end that has arrived before the connection
};

Agent::Agent(const AgentJob& job)
    : job_(job), signals_(io_, block_agent_signals(), [this](int signal) { on_signal(signal); }) {
  hello_.host = own_hostname();
  const std::vector<CoreShare> shares = find_shares(job.ranks, job.under_mpirun);
  for (std::size_t i = 0; i < job.ranks.size(); ++i) {
    const RankIdentity& identity = job.ranks[i];
    if (identity.rank == 0) {
      master_port_ = reserve_port(io_);
      hello_.master_port = port_of(master_port_);
    }
    hello_.seats.push_back({.rank = identity.rank,
                            .local_rank = identity.local_rank,
                            .omp_threads = shares[i].threads,
                            .bound_cpus = static_cast<int>(shares[i].cpus.size())});
    running_.push_back(std::make_unique<RankProcess>(
        io_, identity.rank, program_of(identity, shares[i]), !job.under_mpirun, *this));
  }
}

RankProcess::Program Agent::program_of(const RankIdentity& identity, const CoreShare& share) const {
  return {.argv = job_.program,
          .cpus = share.cpus,
          .stdin_fd = identity.rank == 0 || job_.under_mpirun ? -1 : no_input_.get(),
          .use_terminal = environment_variable(kOutputTtyVariable) == "1",
          .make_environment = [this, identity, omp_threads = share.threads](
                                  const StartOrder& order, const std::string& init_method) {
            return environment(identity, omp_threads, order, init_method);
          }};
}

std::vector<std::string> Agent::environment(const RankIdentity& identity, int omp_threads,
                                            StartOrder order,
                                            const std::string& init_method) const {
  if (order.address.empty() && frames_) order.address = peer_address(frames_->socket());
  std::vector<std::string> environment =
      rank_environment(current_environment(), identity, omp_threads);
  job_.add_variables(environment);
  add_job_variables(environment, order, init_method, token_,
                    words_of(environment_variable(kExportsVariable).value_or("")));
  return environment;
}

bool Agent::connect() {
  return reach_launcher(io_, hello_, token_, text("rank ", job_.ranks.front().rank),
                        {.on_welcome =
                             [this](std::shared_ptr<FrameConnection> frames, const Welcome& welcome,
                                    long long offset) {
                               frames_ = std::move(frames);
                               for (const auto& rank : running_) rank->welcome(welcome, offset);
                             },
                         .on_frame = [this](const Frame& frame) { return on_frame(frame); },
                         .on_end = [this] { on_connection_lost(); },
                         .gives_up = [this] { return early_signal_ != 0; }});
}

int Agent::run() {
  connecting_ = true;
  const bool connected = connect();
  connecting_ = false;
  if (early_signal_ != 0) return 128 + early_signal_;
  if (!connected) return static_cast<int>(ExitCode::kUnavailable);
  while (!step()) {
    set_alarm();
    io_.run_one();
  }
  return code_;
}

bool Agent::step() {
  for (std::size_t i = 0; i < running_.size();) {
    running_[i]->step();
    if (!running_[i]->done()) {
      ++i;
      continue;
    }
    running_[i]->clean_up();
    if (code_ == 0) code_ = running_[i]->exit_code();
    // Pending operations still refer to the rank.
    done_.push_back(std::move(running_[i]));
    running_.erase(running_.begin() + static_cast<long>(i));
  }
  return running_.empty() && (!frames_ || frames_->sent_all());
}

void Agent::set_alarm() {
  std::optional<Deadline> next;
  for (const auto& rank : running_) keep_earlier(next, rank->next_deadline());
  alarm_.set(next);
}

void Agent::on_signal(int signal) {
  const bool ends = signal != SIGCHLD && signal != SIGUSR1 && signal != SIGUSR2;
  if (connecting_ && ends) early_signal_ = signal;
  for (const auto& rank : running_)
    signal == SIGCHLD ? rank->on_child_ended() : rank->on_signal(signal);
}

bool Agent::on_frame(const Frame& frame) {
  if (RankProcess* const rank = find(frame.rank)) rank->on_frame(frame);
  return true;
}

void Agent::on_connection_lost() {
  frames_.reset();
  for (const auto& rank : running_) rank->on_connection_lost();
}

RankProcess* Agent::find(int rank) {
  for (const auto& running : running_)
    if (running->rank() == rank) return running.get();
  return nullptr;
}

void Agent::send(FrameType type, int rank, std::string_view payload) {
  if (frames_) frames_->send(type, rank, payload);
}

}  // namespace

sigset_t block_agent_signals() {
  sigset_t signals;
  ::sigemptyset(&signals);
  for (const int signal : kHandled) ::sigaddset(&signals, signal);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  return signals;
}

int run_ranks(const AgentJob& job) {
  const std::size_t ranks = job.ranks.size();
  raise_descriptor_limit(kOwnDescriptors + kDescriptorsOfARank * ranks, " on " + own_hostname(),
                         text("its ", ranks, " ranks"));
  try {
    return Agent(job).run();
  } catch (const std::system_error& error) {
    std::vector<int> numbers;
    for (const RankIdentity& identity : job.ranks) numbers.push_back(identity.rank);
    throw LaunchError(ExitCode::kInternal, text("cannot watch ", rank_list(numbers), " on ",
                                                own_hostname(), ": ", error.what()));
  }
}

int run_agent() {
  const auto order = read_host_order(STDIN_FILENO, kOrderTimeoutMs);
  if (!order) {
    throw LaunchError(ExitCode::kUsage,
                      "--agent is for hvdrun's own use: expected an order on standard input, got "
                      "other data or none; install the same version of hvdrun on every host");
  }
  for (const auto& [name, value] : order->variables) ::setenv(name.c_str(), value.c_str(), 1);
  if (!order->folder.empty()) {
    if (::chdir(order->folder.c_str()) != 0) {
      throw LaunchError(ExitCode::kUnavailable,
                        text(own_hostname(), ": cannot enter ", order->folder,
                             ", the folder that hvdrun was started in: ", std::strerror(errno)));
    }
    ::setenv("PWD", order->folder.c_str(), 1);
  }
  if (order->heartbeat > 0) return run_elastic_agent(*order);
  AgentJob job{.program = order->program};
  RankIdentity identity{.size = order->size, .local_size = static_cast<int>(order->ranks.size())};
  for (const int rank : order->ranks) {
    identity.rank = rank;
    job.ranks.push_back(identity);
    ++identity.local_rank;
  }
  return run_ranks(job);
}

}  // namespace hvd::launcher
