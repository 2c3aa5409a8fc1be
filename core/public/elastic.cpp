#include "hvd/elastic.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "bootstrap/build_identity.h"
#include "bootstrap/join.h"
#include "bootstrap/socket_server.h"
#include "device/context.h"
#include "device/probe.h"
#include "elastic/member_link.h"
#include "elastic/peer_address.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"
#include "public/elastic_maintenance.h"
#include "public/elastic_stage.h"
#include "public/elastic_state.h"
#include "public/elastic_worker.h"
#include "public/process.h"

namespace hvd::elastic {
namespace {

/// Limit of the connections to a generation's server that are not from its ranks.
constexpr int kMaxUnadmitted = 1024;
/// Limit of the failed attempts to form a generation that hvdrun has not reset.
constexpr int kMaxAttempts = 10;
/// Time limit of the calls that check whether a GPU works.
constexpr Duration kDeviceTimeout = std::chrono::seconds(10);

std::atomic<std::uint64_t>& present_generation() {
  static std::atomic<std::uint64_t> generation{0};
  return generation;
}

void broadcast_bytes(const char* name, std::span<std::byte> bytes, int root,
                     const ProcessSet& set) {
  if (bytes.empty()) return;
  const TensorView view{.data = bytes.data(),
                        .count = static_cast<std::int64_t>(bytes.size()),
                        .dtype = DataType::kUInt8,
                        .shape = {static_cast<std::int64_t>(bytes.size())}};
  const Operation operation = submit({.name = name,
                                      .parameters = Broadcast{root},
                                      .input = view,
                                      .output = view,
                                      .process_set = set.id()},
                                     Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
}

/// Sent before a state.
struct Header {
  std::uint64_t replicated = 0;  ///< bytes
  std::uint64_t own = 0;
  std::uint64_t live = 0;
  std::uint64_t commit = 0;
  std::uint64_t hash = 0;  ///< of all bytes
};

/// Sends the root's last commit to the other ranks of the set; items that commits do not copy are
/// sent in their current state. A commit is received into separate memory, so a rank that is
/// interrupted keeps its former commit. Returns false if the commit has arrived damaged.
bool broadcast_commit(State::Impl& state, int root, const ProcessSet& set) {
  const bool gives = rank() == root;
  std::vector<std::byte> live;
  if (gives) save(state.items, live, is_live);
  State::Impl::Commit& commit = gives ? state.committed : state.spare;
  const auto hash = [&](std::uint64_t replicated) {
    return replicated ^ 3 * hash_of(commit.own) ^ 5 * hash_of(live);
  };
  Header header{commit.replicated.size(), commit.own.size(), live.size(), state.commits,
                gives ? hash(state.committed_hash()) : 0};
  broadcast_bytes("hvd.elastic.header", std::as_writable_bytes(std::span(&header, 1)), root, set);
  resize(commit.replicated, header.replicated);
  resize(commit.own, header.own);
  live.resize(header.live);
  reach(gives ? Stage::kGiving : Stage::kReceiving);
  broadcast_bytes("hvd.elastic.state", commit.replicated, root, set);
  broadcast_bytes("hvd.elastic.own", commit.own, root, set);
  broadcast_bytes("hvd.elastic.live", live, root, set);
  if (gives) return true;
  const std::uint64_t replicated = hash_of(commit.replicated);
  if (hash(replicated) != header.hash) return false;
  load(state.items, live, is_live);
  std::swap(state.committed, state.spare);
  state.known_hash = replicated;
  state.commits = header.commit;
  state.has_state = true;
  return true;
}

/// Functions that are called as long as their registrations exist. Thread-safe.
class Hooks {
 public:
  std::shared_ptr<const void> add(std::function<void()> function) {
    auto kept = std::make_shared<const std::function<void()>>(std::move(function));
    const MutexLock lock(mutex_);
    all_.push_back(kept);
    return kept;
  }
  /// Calls the functions in the order of their registration.
  void call() {
    std::vector<std::shared_ptr<const std::function<void()>>> live;
    {
      const MutexLock lock(mutex_);
      std::erase_if(all_, [](const auto& function) { return function.expired(); });
      for (const auto& function : all_)
        if (auto kept = function.lock()) live.push_back(std::move(kept));
    }
    for (const auto& function : live) (*function)();
  }

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<const std::function<void()>>> all_ HVD_GUARDED_BY(mutex_);
};

/// The functions that at_each_generation() has registered.
Hooks& generation_begins() {
  static auto* const hooks = new Hooks;
  return *hooks;
}

/// The functions that at_generation_end() has registered.
Hooks& generation_ends() {
  static auto* const hooks = new Hooks;
  return *hooks;
}

/// A server of this worker at which the ranks of the next generation find each other.
class RendezvousServer {
 public:
  RendezvousServer()
      : server_(0, runtime::generation_server("the elastic job", kMaxUnadmitted),
                std::chrono::steady_clock::now() + std::chrono::seconds(10)) {}
  std::string address() const { return encode(own_address(server_.port())); }

 private:
  rendezvous::SocketServer server_;
};

/// The worker with this rank in the generation, unless it is this process.
std::optional<member::WorkerId> worker_of(const member::Assign& assign, int rank, int own_rank) {
  const bool known = rank >= 0 && static_cast<std::size_t>(rank) < assign.seats.size();
  if (!known || rank == own_rank) return std::nullopt;
  return assign.seats[static_cast<std::size_t>(rank)].worker;
}

/// The rank that has caused the end of a generation; -1: unknown, or more than one.
int lost_rank(const std::exception& error) {
  if (const auto* const lost = dynamic_cast<const PeerLostError*>(&error)) return lost->rank();
  if (const auto* const stalled = dynamic_cast<const StalledError*>(&error)) return stalled->rank();
  return -1;
}

/// run() in a worker of an elastic job.
class Worker {
 public:
  Worker(State::Impl& state, const std::function<void()>& function, const RunOptions& options,
         runtime::RuntimeOptions settings, const WorkerIdentity& identity)
      : state_(state),
        function_(function),
        options_(options),
        settings_(std::move(settings)),
        link_(std::make_shared<MemberLink>(
            identity.socket, identity.id,
            text(runtime::build_identity(), "; ", layout(state.items)))) {
    state_.link = link_.get();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() {
    state_.running = false;
    state_.link = nullptr;
    link_->set_interrupt({});
    link_->stop();
  }

  void run();

 private:
  void leave(const std::string& cause);
  void require_device(const std::shared_ptr<device::Context>&);
  [[noreturn]] void end_unfinished();
  void form(const member::Form&);
  void connect(const member::Form&);
  void receive_state(const member::Assign&);
  void make_state(const member::Assign&);
  void enter();
  void call_function();
  bool ended(const std::exception&) const;
  void report(const std::exception&);

  State::Impl& state_;
  const std::function<void()>& function_;
  const RunOptions& options_;
  const runtime::RuntimeOptions settings_;
  std::optional<RendezvousServer> server_;
  member::Assign assign_ = {};
  Change change_ = {};
  int rank_ = -1;
  bool in_order_ = false;    ///< the program has left its function at the commit of a change
  bool own_error_ = false;   ///< the program's `load` has thrown
  bool at_end_ = false;      ///< the function has returned in the current generation
  int attempts_ = 0;         ///< to form a generation, since the last one that has run
  KeptObjects left_behind_;  ///< by generations before the current one
  Maintenance maintenance_;
  /// The runtime of the last generation may outlive run(), and reports its failure to the link.
  const std::shared_ptr<MemberLink> link_;
};

void Worker::run() {
  state_.reserve();
  link_->join();
  for (;;) {
    Next next = link_->next();
    switch (next.kind) {
      case Next::Kind::kLeave:
        leave(next.cause);
        break;
      case Next::Kind::kForm:
        form(next.form);
        break;
      case Next::Kind::kRun:
        enter();
        if (std::exchange(in_order_, false)) leave("the members of the job change");
        break;
      case Next::Kind::kFinish:
        if (!at_end_) end_unfinished();
        return;
      case Next::Kind::kExit:
        throw Error(text("hvd::elastic::run: this process leaves the job: ", next.cause));
    }
  }
}

/// Ends a process that the job no longer needs: a spare, or a worker that leaves with its host. The
/// program must not continue as if its function had returned.
void Worker::end_unfinished() {
  HVD_LOG(kInfo) << "the elastic job has ended or no longer needs this process";
  maintenance_.stop();
  std::exit(EXIT_SUCCESS);
}

/// Leaves the generation. Memory that another rank may still read is not changed before the next
/// generation is assigned: Note [Memory after a failure].
void Worker::leave(const std::string& cause) {
  at_end_ = false;
  generation_ends().call();
  auto runtime = runtime::runtime_or_null();
  const auto device = runtime ? runtime->device() : nullptr;
  runtime.reset();  // it ends below, with the communicators
  runtime::leave_generation();
  link_->set_interrupt({});
  require_device(device);
  change_.cause = cause;
  server_.reset();
  server_.emplace();
  link_->left(state_.summary(), static_cast<bool>(options_.load), server_->address(),
              state_.divided());
  reach(Stage::kReady);
}

/// Ends the process if its GPU does not work any more, because it would break every later
/// generation. Exit handlers are skipped, because those of CUDA may wait for the GPU.
void Worker::require_device(const std::shared_ptr<device::Context>& device) {
  if (!device) return;
  const std::string failure = device::find_failure(device, kDeviceTimeout);
  if (failure.empty()) return;
  HVD_LOG(kError) << "this process ends and is replaced, because its GPU does not work any more: "
                  << failure;
  std::fflush(nullptr);
  ::_exit(EXIT_FAILURE);
}

/// Whether the end of the generation has caused the exception.
bool Worker::ended(const std::exception& error) const {
  const auto runtime = runtime::runtime_or_null();
  if (link_->over() || (runtime && runtime->failed())) return true;
  return dynamic_cast<const StalledError*>(&error) != nullptr ||
         dynamic_cast<const PeerLostError*>(&error) != nullptr;
}

void Worker::report(const std::exception& error) {
  HVD_LOG(kInfo) << "generation " << assign_.generation << " has ended here: " << error.what();
  link_->failed(assign_.generation, worker_of(assign_, lost_rank(error), rank_), error.what());
}

/// Forms a generation. If that fails, hvdrun resets it, and another attempt follows. This rank
/// cannot detect whether the fault is its own, so its process ends after several failures.
void Worker::form(const member::Form& form) {
  // By now every survivor has left the earlier generations, and no lost process runs.
  maintenance_.stop();
  left_behind_ = take_kept();
  assign_ = form.assign;
  rank_ = static_cast<int>(form.rank);
  reach(Stage::kAssigned);
  try {
    connect(form);
    server_.reset();
    if (link_->over()) return;
    make_state(form.assign);
    link_->synced(form.assign.generation, state_.summary());
    reach(Stage::kSynced);
  } catch (const std::exception& error) {
    if (own_error_) link_->report_exception(assign_.state.commit, error.what());
    if (own_error_ || (!link_->over() && ++attempts_ >= kMaxAttempts)) throw;
    report(error);
  }
}

void Worker::connect(const member::Form& form) {
  std::vector<PeerAddress> ranks;
  for (const member::Seat& seat : form.assign.seats) {
    auto address = decode_peer_address(seat.address);
    if (!address) {
      throw Error(text("hvd::elastic: worker ", seat.worker, " has no valid address: '",
                       seat.address, "'; start the same program everywhere"));
    }
    ranks.push_back(std::move(*address));
  }
  const auto interruption = std::make_shared<rendezvous::Interruption>();
  link_->set_interrupt([interruption](const std::string&) { interruption->interrupt(); });
  if (link_->over()) interruption->interrupt();
  runtime::RuntimeOptions settings = settings_;
  for (const member::Seat& seat : form.assign.seats) settings.worker_of_rank.push_back(seat.worker);
  settings.on_failure = [link = link_, assign = form.assign, own = rank_](const Status& cause) {
    const bool lost = cause.code == StatusCode::kPeerLost;
    link->failed(assign.generation, lost ? worker_of(assign, cause.rank, own) : std::nullopt,
                 cause.message);
  };
  reach(Stage::kConnecting);
  const auto runtime =
      runtime::adopt(settings, runtime::join_generation(settings, runtime::process_arena(),
                                                        {.hosts = addresses_of_rank_0(ranks),
                                                         .port = ranks.front().port,
                                                         .rank = rank_,
                                                         .size = static_cast<int>(ranks.size()),
                                                         .interruption = interruption}));
  const auto end = [runtime](const std::string& cause) {
    runtime->fail_soon(
        {StatusCode::kPeerLost, "the elastic job is forming a new generation: " + cause, -1});
  };
  link_->set_interrupt(end);
  if (link_->over()) end(change_.cause);
}

/// Sends the root's state to the ranks that receive it. Other ranks do not take part.
void Worker::receive_state(const member::Assign& assign) {
  const int root = static_cast<int>(assign.root);
  std::vector<int> ranks;  // the root and the receivers
  for (int rank = 0; rank < static_cast<int>(assign.seats.size()); ++rank) {
    if (rank == root || assign.load || assign.seats[static_cast<std::size_t>(rank)].receives)
      ranks.push_back(rank);
  }
  if (ranks.size() < 2 || std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) return;
  const bool all = ranks.size() == assign.seats.size();
  const ProcessSet set =
      all ? ProcessSet()
          : add_process_set(std::move(ranks), {.by_members = true, .name = "hvd.elastic.state"});
  if (!broadcast_commit(state_, root, set)) {
    // The coordinator will detect that this rank's state differs from the others', and replace it.
    HVD_LOG(kError) << "the state received from rank " << root << " has a wrong checksum";
  }
  if (!all) remove_process_set(set);
}

/// Makes the states of all ranks equal.
void Worker::make_state(const member::Assign& assign) {
  const bool root = rank_ == static_cast<int>(assign.root);
  if (assign.load && root) {
    own_error_ = true;
    if (options_.load) options_.load();
    own_error_ = false;
    state_.commits = assign.state.commit;
    state_.save_commit();
  }
  receive_state(assign);
  if (!state_.has_state) return;
  state_.restore_commit();
  state_.confirm();
}

void Worker::enter() {
  const int size = static_cast<int>(assign_.seats.size());
  change_.old_size = std::exchange(change_.new_size, size);
  change_.old_rank = std::exchange(change_.new_rank, rank_);
  if (present_generation().exchange(assign_.generation) == 0) {
    change_.old_size = 0;
    change_.old_rank = -1;
  }
  change_.generation = assign_.generation;
  attempts_ = 0;
  maintenance_.start(std::move(left_behind_));
  try {
    call_function();
  } catch (const GenerationOver&) {
    in_order_ = true;
  } catch (const StateLostError& error) {
    HVD_LOG(kError) << error.what();
    state_.lose();
    report(error);
  } catch (const std::exception& error) {
    if (!ended(error)) {
      link_->report_exception(state_.commits, error.what());
      throw;
    }
    report(error);
  }
}

void Worker::call_function() {
  generation_begins().call();
  for (const auto& callback : state_.callbacks) callback(change_);
  state_.running = true;
  try {
    function_();
  } catch (...) {
    state_.running = false;
    throw;
  }
  state_.running = false;
  at_end_ = true;
  link_->at_end();
  reach(Stage::kAtEnd);
}

/// run() in any other job.
void run_once(State::Impl& state, const std::function<void()>& function,
              const RunOptions& options) {
  const Change change{.new_size = size(), .new_rank = rank(), .cause = "the job has begun"};
  if (change.new_rank == 0 && options.load) options.load();
  if (change.new_size > 1) {
    state.save_commit();
    if (!broadcast_commit(state, 0, ProcessSet())) {
      throw Error(
          "hvd::elastic::run: the state received from rank 0 has a wrong checksum; test the "
          "memory and the network of the host");
    }
    state.restore_commit();
  }
  state.committed = {};
  state.spare = {};
  state.confirm();
  for (const auto& callback : state.callbacks) callback(change);
  state.running = true;
  function();
}

std::atomic<bool>& in_run() {
  static std::atomic<bool> value{false};
  return value;
}

/// Ensures that only one thread of the process is in run().
class InRun {
 public:
  explicit InRun(State::Impl& state) : state_(state) {
    if (in_run().exchange(true))
      throw UsageError("hvd::elastic::run: called in the function of run(); expected one call");
  }
  InRun(const InRun&) = delete;
  InRun& operator=(const InRun&) = delete;
  ~InRun() {
    state_.running = false;
    in_run().store(false);
  }

 private:
  State::Impl& state_;
};

/// Call this when an exception has left run(): the other ranks form a new generation, and this
/// one is lost once its process ends.
void end_generation(const std::exception& error) {
  if (const auto runtime = runtime::runtime_or_null()) {
    runtime->fail_soon({StatusCode::kInternal,
                        text("the program of rank ", runtime->topology().rank,
                             " has ended with an exception: ", error.what()),
                        -1});
  }
}

}  // namespace

void run(State& state, const std::function<void()>& function, const RunOptions& options) {
  if (!function) throw UsageError("hvd::elastic::run: expected a function");
  const InRun here(state.impl());
  const auto identity = worker_identity();
  if (!identity) return run_once(state.impl(), function, options);
  auto settings = runtime::elastic_options();
  if (!settings) throw NotInitializedError("hvd is not initialised; call hvd::init() before run()");
  if (!claim_worker()) {
    throw UsageError(
        "hvd::elastic::run: called a second time; an elastic job has one run(), and ends with it");
  }
  settings->device_slot = device_slot();
  runtime::set_in_elastic_run(true);
  try {
    Worker(state.impl(), function, options, std::move(*settings), *identity).run();
  } catch (const std::exception& error) {
    end_generation(error);
    runtime::set_in_elastic_run(false);
    throw;
  }
  runtime::set_in_elastic_run(false);
}

bool launched() noexcept {
  return worker_identity().has_value() || std::getenv("TORCHELASTIC_RUN_ID") != nullptr;
}

int restart_count() noexcept {
  const char* const found = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const auto count = parse_number<int>(found != nullptr ? found : "");
  return count && *count > 0 ? *count : 0;
}

std::uint64_t generation() noexcept { return present_generation().load(); }

bool has_rank() noexcept { return runtime::runtime_or_null() != nullptr; }

std::shared_ptr<const void> at_each_generation(std::function<void()> function) {
  if (!function) throw UsageError("hvd::elastic::at_each_generation: expected a function");
  return generation_begins().add(std::move(function));
}

std::shared_ptr<const void> at_generation_end(std::function<void()> function) {
  if (!function) throw UsageError("hvd::elastic::at_generation_end: expected a function");
  return generation_ends().add(std::move(function));
}

}  // namespace hvd::elastic
