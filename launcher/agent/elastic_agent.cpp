#include "agent/elastic_agent.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/post.hpp>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/core_share.h"
#include "agent/launcher_connection.h"
#include "agent/member_socket.h"
#include "agent/rank_process.h"
#include "agent/worker_environment.h"
#include "base/process_watch.h"
#include "base/text.h"
#include "member/lease.h"
#include "system/error.h"
#include "system/event_loop.h"
#include "system/process.h"
#include "system/socket.h"
#include "system/times.h"
#include "transport/node/life_lock.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

/// While more bytes than this are queued for hvdrun, the workers' member sockets wait.
constexpr std::size_t kMaxQueuedBytes = 1 << 20;
/// The descriptors of an agent: its own, and those of each slot (two pipes, three sockets).
constexpr std::size_t kBaseDescriptors = 24, kDescriptorsOfASlot = 8;
/// Interval between checks of a killed worker, whose threads end long before its memory is free.
constexpr milliseconds kPollInterval{1};
constexpr milliseconds kLongestOrphanGrace{500};
/// The limits of one attempt to join: for the connection, and for the answer.
constexpr milliseconds kJoinTimeout{5'000};
constexpr milliseconds kPauseBetweenJoins{200};

class ElasticAgent final : public RankProcess::Link {
 public:
  /// @param endpoint of a node that joins by itself; null: hvdrun has started this agent
  ElasticAgent(const HostOrder& order, const Endpoint* endpoint, int slots);
  int run();

 private:
  /// A slot that runs one worker after the other.
  struct Slot {
    int number = 0;
    int local_rank = 0;
    CoreShare share = {};
    std::unique_ptr<RankProcess> worker = {};
    std::shared_ptr<MemberSocket> member = {};
    bool killed = false;  ///< until it is known to have ended
  };

  void send(FrameType type, int rank, std::string_view payload) override {
    if (frames_) frames_->send(type, rank, payload);
  }
  bool has_room() const override { return !frames_ || frames_->unsent() < kMaxQueuedBytes; }

  void add_slots(const std::vector<int>& numbers);
  void on_slots(const Frame& frame);
  bool connect();
  bool join(const LauncherHandlers& handlers);
  int code() const;
  void on_signal(int signal);
  bool on_frame(const Frame& frame);
  void start(Slot& slot, const Frame& frame);
  void on_connection_lost();
  void check_lease();
  void step();
  void check_killed(Slot& slot);
  void dispose(Slot& slot);
  void set_alarm();
  bool idle() const;
  Slot* find(int number);

  HostOrder order_;
  const Endpoint* const endpoint_;
  const std::string token_ = environment_variable(kTokenVariable).value_or("");
  const std::string exports_ = environment_variable(kExportsVariable).value_or("");
  asio::io_context io_{1};
  Alarm alarm_{io_};
  SignalReader signals_;
  const UniqueFd no_input_{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  Hello hello_;
  Welcome welcome_;
  long long clock_offset_ns_ = 0;
  std::shared_ptr<FrameConnection> frames_;  ///< null before the welcome and after a loss
  std::optional<member::Lease> lease_;
  std::vector<Slot> slots_;
  int early_signal_ = 0;         ///< a request to end that has arrived before the connection
  bool leaves_ = false;          ///< a request to end has arrived after the connection
  std::optional<int> finished_;  ///< hvdrun's exit code
  bool ending_ = false;
};

ElasticAgent::ElasticAgent(const HostOrder& order, const Endpoint* endpoint, int slots)
    : order_(order),
      endpoint_(endpoint),
      signals_(io_, block_agent_signals(), [this](int signal) { on_signal(signal); }) {
  hello_.host = own_hostname();
  hello_.slots = slots;
  if (endpoint_ != nullptr) hello_.node = random_token();
  add_slots(order.ranks);
  for (const Slot& slot : slots_) {
    hello_.seats.push_back({.rank = slot.number,
                            .local_rank = slot.local_rank,
                            .omp_threads = slot.share.threads,
                            .bound_cpus = static_cast<int>(slot.share.cpus.size())});
  }
}

/// Running workers keep their shares of the cores.
/// @throws LaunchError when there are too few descriptors; nothing has changed then
void ElasticAgent::add_slots(const std::vector<int>& numbers) {
  const std::size_t all = slots_.size() + numbers.size();
  raise_descriptor_limit(kBaseDescriptors + kDescriptorsOfASlot * all, " on " + own_hostname(),
                         text("its ", all, " slots"));
  for (const int number : numbers)
    slots_.push_back({.number = number, .local_rank = static_cast<int>(slots_.size())});
  const auto count = static_cast<int>(slots_.size());
  std::vector<RankIdentity> identities;
  for (int i = 0; i < count; ++i)
    identities.push_back({.rank = i, .size = count, .local_rank = i, .local_size = count});
  const std::vector<CoreShare> shares = find_shares(identities, false);
  for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].share = shares[i];
}

bool ElasticAgent::connect() {
  const auto on_welcome = [this](std::shared_ptr<FrameConnection> frames, const Welcome& welcome,
                                 long long offset) {
    frames_ = std::move(frames);
    welcome_ = welcome;
    clock_offset_ns_ = offset;
    if (endpoint_ != nullptr) {
      order_.renewal = welcome.renewal;
      order_.heartbeat = welcome.heartbeat;
      order_.kill = welcome.kill;
      add_slots(welcome.ranks);
    }
    lease_.emplace(nanoseconds(order_.renewal), nanoseconds(order_.heartbeat), time_now());
  };
  const LauncherHandlers handlers{
      .on_welcome = on_welcome,
      .on_frame = [this](const Frame& frame) { return on_frame(frame); },
      .on_end = [this] { on_connection_lost(); },
      .gives_up = [this] { return early_signal_ != 0; }};
  return endpoint_ != nullptr ? join(handlers)
                              : reach_launcher(io_, hello_, token_, "the agent", handlers);
}

/// Tries until the endpoint's node has started, or for the start timeout.
bool ElasticAgent::join(const LauncherHandlers& handlers) {
  const auto begin = std::chrono::steady_clock::now();
  const auto end = begin + milliseconds(whole_ms(endpoint_->start_timeout_s));
  const std::string port = text(endpoint_->port);
  while (early_signal_ == 0) {
    asio::error_code error;
    std::vector<std::string> addresses;
    for (const auto& entry : asio::ip::tcp::resolver(io_).resolve(endpoint_->host, port, error))
      addresses.push_back(entry.endpoint().address().to_string());
    if (connect_to_launcher(io_,
                            {.addresses = addresses,
                             .port = static_cast<std::uint16_t>(endpoint_->port),
                             .same_clock = endpoint_->here},
                            hello_, token_,
                            silence_limit_ms(environment_variable(kPeerTimeoutVariable)),
                            kJoinTimeout, kJoinTimeout, handlers))
      return true;
    if (early_signal_ != 0 || std::chrono::steady_clock::now() >= end) break;
    io_.run_for(kPauseBetweenJoins);
  }
  if (early_signal_ != 0) return false;
  std::fprintf(stderr,
               "hvdrun: --rdzv-endpoint %s:%s: this node has not joined the job within %g s "
               "(--start-timeout): start the same line with the same --rdzv-id on the endpoint's "
               "node, and see whether its port can be reached\n",
               endpoint_->host.c_str(), port.c_str(), endpoint_->start_timeout_s);
  return false;
}

int ElasticAgent::code() const {
  if (endpoint_ == nullptr || leaves_) return 0;
  if (finished_) return *finished_;
  std::fprintf(stderr,
               "hvdrun: the connection to the node of --rdzv-endpoint %s:%d is lost; this node's "
               "ranks have ended\n",
               endpoint_->host.c_str(), endpoint_->port);
  return static_cast<int>(ExitCode::kUnavailable);
}

int ElasticAgent::run() {
  const bool connected = connect();
  if (early_signal_ != 0) return 128 + early_signal_;
  if (!connected) return static_cast<int>(ExitCode::kUnavailable);
  for (;;) {
    check_lease();
    step();
    if (ending_ && idle()) return code();
    set_alarm();
    io_.run_one();
  }
}

void ElasticAgent::on_signal(int signal) {
  const bool ends = signal != SIGCHLD && signal != SIGUSR1 && signal != SIGUSR2;
  if (ends && !lease_) early_signal_ = signal;
  // The first request lets the workers leave at a commit; the second request does not wait for
  // that.
  if (ends && frames_ && !std::exchange(ending_, true)) {
    leaves_ = true;
    if (endpoint_ != nullptr) {
      std::fprintf(
          stderr,
          "hvdrun: this node leaves the job as soon as the other nodes are enough; a second "
          "signal ends its ranks at once\n");
    }
    return send(FrameType::kLeaving, slots_.front().number, "{}");
  }
  ending_ = ending_ || ends;
  for (const Slot& slot : slots_) {
    if (!slot.worker) continue;
    signal == SIGCHLD ? slot.worker->on_child_ended() : slot.worker->on_signal(signal);
  }
}

bool ElasticAgent::on_frame(const Frame& frame) {
  if (frame.type == FrameType::kLeaseReply) {
    lease_->answered(static_cast<std::uint64_t>(decode<LeaseRequest>(frame.payload).number));
    return true;
  }
  if (frame.type == FrameType::kSlots) {
    on_slots(frame);
    return true;
  }
  if (frame.type == FrameType::kFinished) {
    finished_ = decode<Finished>(frame.payload).code;
    return true;
  }
  Slot* const slot = find(frame.rank);
  if (slot == nullptr) return false;
  if (frame.type == FrameType::kStart) {
    start(*slot, frame);
  } else if (frame.type == FrameType::kMemberReply) {
    if (slot->member) slot->member->send(frame.payload);
  } else if (slot->worker) {
    slot->worker->on_frame(frame);
    if (frame.type == FrameType::kSignal)
      slot->killed = decode<SignalOrder>(frame.payload).signal == SIGKILL;
  }
  return true;
}

/// Answers with all slots of the offer, or with an empty list.
void ElasticAgent::on_slots(const Frame& frame) {
  MoreSlots more = decode<MoreSlots>(frame.payload);
  try {
    add_slots(more.ranks);
  } catch (const LaunchError& error) {
    std::fprintf(stderr, "hvdrun: %s; the host keeps its %zu\n", error.what(), slots_.size());
    more.ranks.clear();
  }
  send(FrameType::kSlotsReply, slots_.front().number, encode(more));
}

/// @throws ProtocolError when the slot has a worker
void ElasticAgent::start(Slot& slot, const Frame& frame) {
  step();  // hvdrun has released the worker before
  if (slot.worker) throw ProtocolError(text("slot ", slot.number, " has a worker"));
  if (ending_) return;
  const int number = slot.number;
  UniqueFd worker_end;
  slot.member = MemberSocket::make(
      io_,
      [this, number](std::string_view bytes) {
        if (frames_) frames_->send(FrameType::kMember, number, bytes);
      },
      [this] { return has_room(); }, worker_end);
  const auto kept = split_text(exports_, ',');
  slot.worker = std::make_unique<RankProcess>(
      io_, number,
      RankProcess::Program{
          .argv = order_.program,
          .cpus = slot.share.cpus,
          .stdin_fd = no_input_.get(),
          .inherited_fd = worker_end.get(),
          .reports_at_once = true,
          .on_end = [member = slot.member] { member->read_all(); },
          .orphan_grace = std::min(kLongestOrphanGrace, std::chrono::duration_cast<milliseconds>(
                                                            nanoseconds(order_.kill / 2))),
          .use_terminal = environment_variable(kOutputTtyVariable) == "1",
          .make_environment =
              [this, words = std::vector<std::string>(kept.begin(), kept.end()),
               settings = WorkerSettings{.local_rank = slot.local_rank,
                                         .omp_threads = slot.share.threads,
                                         .member_socket = worker_end.get()}](
                  const StartOrder& order, const std::string&) {
                return worker_environment(current_environment(), settings, order, token_, words);
              }},
      false, *this);
  slot.worker->welcome(welcome_, clock_offset_ns_);
  slot.worker->on_frame(frame);
}

void ElasticAgent::on_connection_lost() {
  frames_.reset();
  ending_ = true;
  for (const Slot& slot : slots_)
    if (slot.worker) slot.worker->on_connection_lost();
}

void ElasticAgent::check_lease() {
  if (!frames_) return;
  if (lease_->expired(time_now())) {
    // hvdrun treats this host as lost. The workers must end before hvdrun's deadline.
    frames_->close();
    for (const Slot& slot : slots_)
      if (slot.worker && slot.worker->pid() > 0) ::kill(-slot.worker->pid(), SIGKILL);
    return on_connection_lost();
  }
  if (time_now() < lease_->next_request()) return;
  const auto request = static_cast<long long>(lease_->request(time_now()));
  send(FrameType::kLease, slots_.front().number, encode(LeaseRequest{.number = request}));
}

void ElasticAgent::step() {
  for (Slot& slot : slots_) {
    if (!slot.worker) continue;
    slot.worker->step();
    slot.member->resume();
    if (slot.killed) check_killed(slot);
    if (slot.worker->done()) dispose(slot);
  }
}

/// The system reports the end of a process only after it has freed the memory. The next generation
/// waits only until no thread of the process runs.
void ElasticAgent::check_killed(Slot& slot) {
  const pid_t pid = slot.worker->pid();
  if (pid > 0 && !host::has_exited({.pid = pid, .pid_namespace = current_process().pid_namespace}))
    return;
  slot.killed = false;
  slot.member->read_all();
  if (pid > 0) send(FrameType::kGone, slot.number, "{}");
}

void ElasticAgent::dispose(Slot& slot) {
  slot.worker->clean_up();
  slot.member->close();
  slot.member.reset();
  slot.killed = false;
  // The worker's operations have been cancelled. Their handlers, which refer to the worker, run
  // before this one.
  asio::post(io_, [ended = std::shared_ptr<RankProcess>(std::move(slot.worker))] {});
}

void ElasticAgent::set_alarm() {
  std::optional<Deadline> next;
  if (frames_) {
    keep_earlier(next, as_deadline(lease_->next_request()));
    keep_earlier(next, as_deadline(lease_->expiry()));
  }
  for (const Slot& slot : slots_) {
    if (slot.worker) keep_earlier(next, slot.worker->next_deadline());
    if (slot.killed) keep_earlier(next, std::chrono::steady_clock::now() + kPollInterval);
  }
  alarm_.set(next);
}

bool ElasticAgent::idle() const {
  return std::none_of(slots_.begin(), slots_.end(),
                      [](const Slot& slot) { return slot.worker != nullptr; }) &&
         (!frames_ || frames_->sent_all());
}

ElasticAgent::Slot* ElasticAgent::find(int number) {
  const auto found = std::find_if(slots_.begin(), slots_.end(),
                                  [number](const Slot& slot) { return slot.number == number; });
  return found == slots_.end() ? nullptr : &*found;
}

int run_agent_of(const HostOrder& order, const Endpoint* endpoint, int slots) {
  try {
    return ElasticAgent(order, endpoint, slots).run();
  } catch (const std::system_error& error) {
    throw LaunchError(ExitCode::kInternal,
                      text("cannot watch the workers on ", own_hostname(), ": ", error.what()));
  }
}

}  // namespace

int run_elastic_agent(const HostOrder& order) { return run_agent_of(order, nullptr, 0); }

int run_node_agent(const HostOrder& order, const Endpoint& endpoint, int slots) {
  return run_agent_of(order, &endpoint, slots);
}

}  // namespace hvd::launcher
