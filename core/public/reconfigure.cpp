#include "hvd/reconfigure.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/process_exit.h"
#include "base/process_watch.h"
#include "base/sha256.h"
#include "base/text.h"
#include "base/thread.h"
#include "bootstrap/join.h"
#include "bootstrap/messages.h"
#include "bootstrap/socket_server.h"
#include "elastic/peer_address.h"
#include "hvd/error.h"
#include "public/process.h"
#include "public/reconfigure_handle.h"
#include "transport/node/life_lock.h"

namespace hvd {
namespace {

/// Limit of the connections to this process's server that are not from ranks.
constexpr int kMaxUnadmitted = 1024;
constexpr auto kCheckInterval = std::chrono::milliseconds(50);
/// Time for members on other hosts to arrive and receive the reason of a failure.
constexpr auto kTimeToInform = std::chrono::milliseconds(500);
/// The kernel closes the connections of a process before it reports its end.
constexpr auto kTimeToEnd = std::chrono::seconds(1);
/// Time for all members, after they have arrived, to leave their former jobs and connect. A former
/// job may have communicators and a GPU that do not reply.
constexpr auto kGrace = std::chrono::seconds(30);

/// A server at which the ranks of the next job find each other if this process is its rank 0.
class RendezvousServer {
 public:
  RendezvousServer()
      : server_(0, settings(), std::chrono::steady_clock::now() + std::chrono::seconds(10)),
        handle_(runtime::encode({.address = elastic::own_address(server_.port()),
                                 .process = rendezvous::this_process(),
                                 .id = rendezvous::random_id()})) {}
  const std::string& handle() const noexcept { return handle_; }
  /// Reports to the processes that have arrived why there will be no job.
  void report_lost(int rank) {
    server_.fail(rendezvous::Refusal::lost(rank, "its process has ended before all had arrived"));
  }

 private:
  static rendezvous::StoreServer::Options settings() {
    auto options = runtime::generation_server("hvd::reconfigure", kMaxUnadmitted);
    // Processes may wait here in calls that name other members.
    options.one_session_per_rank = false;
    return options;
  }

  rendezvous::SocketServer server_;
  const std::string handle_;
};

/// The state of this process between calls of reconfigure(). Never destroyed.
struct ReconfigureState {
  Mutex mutex;  // held through reconfigure()
  std::unique_ptr<RendezvousServer> server HVD_GUARDED_BY(mutex);
  pid_t owner HVD_GUARDED_BY(mutex) = 0;  // of the server
  std::set<std::int64_t> used HVD_GUARDED_BY(mutex);
  // The other processes of this host that were in a former job and may still use its memory.
  std::vector<ProcessIdentity> unfenced HVD_GUARDED_BY(mutex);
  bool memory_lost HVD_GUARDED_BY(mutex) = false;  // see runtime::FormerPeers
  std::atomic<bool> formed{false};                 // a job
};

ReconfigureState& reconfigure_state() {
  static ReconfigureState* const instance = new ReconfigureState;
  return *instance;
}

const std::string& own_handle(ReconfigureState& own) HVD_REQUIRES(own.mutex) {
  if (!own.server || own.owner != ::getpid()) {
    own.server = std::make_unique<RendezvousServer>();
    own.owner = ::getpid();
  }
  return own.server->handle();
}

std::string describe(const runtime::ReconfigureHandle& handle) {
  return rendezvous::to_string(handle.process);
}

/// Detects the end of members on this host before they have arrived. On rank 0 this ends the call.
/// The other ranks wait for the reason from rank 0, because rank 0 would mistake their own end for
/// a loss.
class MemberWatch {
 public:
  MemberWatch(const std::vector<runtime::ReconfigureHandle>& members, int own,
              std::shared_ptr<rendezvous::Interruption> interruption)
      : interruption_(std::move(interruption)) {
    for (std::size_t rank = 0; rank < members.size(); ++rank) {
      if (static_cast<int>(rank) != own)
        watched_.emplace_back(static_cast<int>(rank), rendezvous::watch(members[rank].process));
    }
    if (own != 0) {
      const auto ended = [](auto& process) { return process.second.ended(); };
      const auto found = std::ranges::find_if(watched_, ended);
      if (found != watched_.end()) lost_before_ = found->first;
      return;
    }
    find_ended();
    thread_ = start_thread("hvd-members", [this](const std::stop_token& stop) { run(stop); });
  }
  MemberWatch(const MemberWatch&) = delete;
  MemberWatch& operator=(const MemberWatch&) = delete;
  ~MemberWatch() { stop(); }
  /// Ends the watch, and returns a member whose process has ended: the first one that was found,
  /// but not rank 0 if another one has ended too, because rank 0 also ends when it gives up.
  std::optional<int> end() {
    stop();
    if (thread_.joinable()) thread_.join();
    find_ended();
    return lost_;
  }
  /// A member whose process had ended before the call of a rank that is not rank 0.
  std::optional<int> lost_before() const { return lost_before_; }
  /// Whether the process of a rank can be observed from here.
  bool observes(int rank) const {
    const auto found = std::ranges::find(watched_, rank, &std::pair<int, ProcessWatch>::first);
    return found != watched_.end() && found->second.works();
  }
  /// Whether the process of a rank is running, as far as this host can detect. Waits for a moment,
  /// so that a process that is just ending does not count. Call end() before.
  bool runs(int rank) {
    const auto found = std::ranges::find(watched_, rank, &std::pair<int, ProcessWatch>::first);
    if (found == watched_.end() || !found->second.works()) return false;
    const auto until = std::chrono::steady_clock::now() + kTimeToEnd;
    while (!found->second.ended()) {
      if (std::chrono::steady_clock::now() >= until) return true;
      std::this_thread::sleep_for(kCheckInterval);
    }
    return false;
  }

 private:
  bool find_ended() {
    for (auto& [rank, process] : watched_) {
      if (!process.ended()) continue;
      if (lost_.value_or(0) == 0) lost_ = rank;
      interruption_->interrupt();
    }
    return lost_.has_value();
  }
  void stop() {
    const MutexLock lock(mutex_);
    if (thread_.joinable()) thread_.request_stop();
    changed_.notify_all();
  }
  void run(const std::stop_token& stop) {
    while (!stop.stop_requested() && !find_ended()) {
      const MutexLock lock(mutex_);
      if (!stop.stop_requested()) changed_.wait_until(mutex_, SteadyClock().now() + kCheckInterval);
    }
  }

  const std::shared_ptr<rendezvous::Interruption> interruption_;
  std::vector<std::pair<int, ProcessWatch>> watched_;  // used by the thread once it runs
  std::optional<int> lost_;                            // used by the thread once it runs
  std::optional<int> lost_before_;
  Mutex mutex_;
  Condition changed_;
  std::jthread thread_;  // last: it uses everything above
};

bool same(const ProcessIdentity& process, const rendezvous::ProcessInfo& member) {
  return process.pid == member.pid && process.start_time == member.start_time &&
         process.pid_namespace == member.pid_namespace;
}

/// Whether a process of a former job may still use memory that it shared with this process.
bool may_use_memory(const ProcessIdentity& process,
                    const std::vector<runtime::ReconfigureHandle>& members) {
  const bool arrived = std::ranges::any_of(members, [&](const auto& member) {
    return member.process.boot == boot_id() && same(process, member.process);
  });
  return !arrived && !ProcessWatch(process).ended() && !host::has_exited(process);
}

/// Decodes and checks the arguments. @return the members by rank
std::vector<runtime::ReconfigureHandle> members_of(const std::vector<std::string>& handles,
                                                   const Options& options) {
  if (options.init_method || options.rank || options.world_size)
    throw UsageError(
        "hvd::reconfigure: an option gives the init method, the rank or the size; expected none of "
        "them, since they follow from the handles");
  std::vector<runtime::ReconfigureHandle> members;
  for (std::size_t rank = 0; rank < handles.size(); ++rank) {
    auto member = runtime::decode_reconfigure_handle(handles[rank]);
    if (!member)
      throw UsageError(text("hvd::reconfigure: handle ", rank, " is '",
                            rendezvous::printable(handles[rank]),
                            "'; expected a text of reconfigure_handle()"));
    members.push_back(std::move(*member));
  }
  std::set<std::string> distinct(handles.begin(), handles.end());
  if (distinct.size() != handles.size())
    throw UsageError("hvd::reconfigure: a handle is in the list twice; expected each process once");
  return members;
}

[[noreturn]] void throw_lost(std::int64_t uuid,
                             const std::vector<runtime::ReconfigureHandle>& members, int rank,
                             const std::string& why) {
  throw PeerLostError(text("hvd::reconfigure ", uuid, ": rank ", rank, " of ", members.size(), " (",
                           describe(members[static_cast<std::size_t>(rank)]), ") is lost: ", why),
                      rank);
}

/// Removes the name of hvd::init() and the advice for it from a text.
std::string without_init(std::string text) {
  for (const std::string_view part :
       {"hvd::init: ", "; start each rank once",
        "; start as many ranks as the world size, with the same place, and see whether one has "
        "ended early",
        "; give all ranks the same place, and see whether rank 0 has ended"}) {
    for (auto at = text.find(part); at != std::string::npos; at = text.find(part))
      text.erase(at, part.size());
  }
  return text;
}

/// The text of an error, with the name of the call.
std::string named(std::int64_t uuid, const std::exception& error) {
  std::string found = error.what();
  if (found.starts_with("hvd::reconfigure")) return found;
  return text("hvd::reconfigure ", uuid, ": ", without_init(found));
}

/// Calls a function and converts its errors to those of the call.
template <class Function>
void name_errors(std::int64_t uuid, const Function& function) {
  try {
    function();
  } catch (const PeerLostError&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const UsageError& error) {
    throw UsageError(named(uuid, error));
  } catch (const std::exception& error) {
    throw Error(named(uuid, error));
  }
}

/// Throws the loss of rank 0, to which this rank has lost the connection, or which has not arrived
/// by the deadline.
[[noreturn]] void throw_without_rank_0(std::int64_t uuid,
                                       const std::vector<runtime::ReconfigureHandle>& members,
                                       MemberWatch& watch, bool early, const std::string& why) {
  const auto& rank_0 = members.front();
  if (early && watch.runs(0))
    throw PeerLostError(
        text("hvd::reconfigure ", uuid, ": rank 0 of ", members.size(), " (", describe(rank_0),
             ") has given up this call, or its handle is used up: ", why),
        -1);
  if (rendezvous::watch(rank_0.process).ended())
    throw_lost(uuid, members, 0, "its process has ended");
  throw_lost(uuid, members, 0,
             early ? text(why, ", or it has given up this call, or its handle is used up") : why);
}

/// Joins the other members. @return the new job, which does not replace the current one yet
runtime::JobConnection join_members(std::int64_t uuid,
                                    const std::vector<runtime::ReconfigureHandle>& members,
                                    const std::string& instance, int own,
                                    const runtime::RuntimeOptions& options,
                                    RendezvousServer& server, std::function<void()> arrived) {
  std::vector<elastic::PeerAddress> addresses;
  for (const auto& member : members) addresses.push_back(member.address);
  const auto interruption = std::make_shared<rendezvous::Interruption>();
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::nanoseconds>(options.start_timeout);
  MemberWatch watch(members, own, interruption);
  const auto throw_if_ended = [&](const std::optional<int>& lost) {
    if (!lost) return;
    if (own == 0) server.report_lost(*lost);
    const auto here = rendezvous::this_process();
    const bool all_here = std::ranges::all_of(members, [&](const auto& member) {
      return member.process.boot == here.boot && member.process.pid_namespace == here.pid_namespace;
    });
    if (own == 0 && !all_here) std::this_thread::sleep_for(kTimeToInform);
    throw_lost(uuid, members, *lost, "its process has ended");
  };
  try {
    return runtime::join_generation(options, runtime::process_arena(),
                                    {.hosts = elastic::addresses_of_rank_0(addresses),
                                     .port = addresses.front().port,
                                     .rank = own,
                                     .size = static_cast<int>(members.size()),
                                     .interruption = interruption,
                                     .source = "hvd::reconfigure",
                                     .instance = instance,
                                     .arrived = std::move(arrived),
                                     .grace = kGrace});
  } catch (const PeerLostError& error) {
    const bool early = std::chrono::steady_clock::now() < deadline;
    // Members here that have lost rank 0, too, may end before this one checks.
    const bool rank_0_alone = own != 0 && early && error.rank() == 0 && !watch.observes(0);
    const auto ended = watch.end();
    throw_if_ended(rank_0_alone ? watch.lost_before() : ended);
    const std::string why = without_init(error.what());
    if (error.rank() == 0) throw_without_rank_0(uuid, members, watch, early, why);
    if (error.rank() > 0) throw_lost(uuid, members, error.rank(), why);
    throw PeerLostError(text("hvd::reconfigure ", uuid, ": ", why), -1);
  } catch (const UsageError&) {
    throw;
  } catch (const std::exception&) {
    throw_if_ended(watch.end());
    throw;
  }
}

}  // namespace

std::string reconfigure_handle() {
  ReconfigureState& own = reconfigure_state();
  const MutexLock lock(own.mutex);
  try {
    return own_handle(own);
  } catch (const std::system_error& error) {
    throw Error(text("hvd::reconfigure_handle: ", error.what()));
  }
}

bool has_reconfigured() noexcept { return reconfigure_state().formed.load(); }

void reconfigure(std::int64_t uuid, const std::vector<std::string>& handles,
                 const Options& options) {
  if (const auto runtime = runtime::runtime_or_null(); runtime && runtime->in_callback())
    throw UsageError(
        "hvd::reconfigure: called in a callback of an operation, on the thread that drives the job "
        "which the call ends; let the callback wake another thread, which makes the call");
  ReconfigureState& own = reconfigure_state();
  const MutexLock lock(own.mutex);
  const auto members = members_of(handles, options);
  const auto found = std::ranges::find(handles, own_handle(own));
  if (found == handles.end())
    throw UsageError(text("hvd::reconfigure: this process is none of the ", handles.size(),
                          " members; expected its present reconfigure_handle() in the list, which "
                          "each call uses up"));
  if (own.used.contains(uuid))
    throw UsageError(text("hvd::reconfigure: the uuid ", uuid,
                          " was already used; expected another one for each call"));
  std::string list = text(uuid);
  for (const auto& member : members) list += " " + member.id;
  const std::string instance = " reconfigure " + hmac_hex("", list);
  const int rank = static_cast<int>(found - handles.begin());
  own.used.insert(uuid);
  const std::unique_ptr<RendezvousServer> server =
      std::move(own.server);  // until all ranks have joined
  // Called with the lock held above.
  const auto arrived = [&, uuid, rank](const auto& leave) HVD_NO_THREAD_SAFETY_ANALYSIS {
    const runtime::FormerPeers former = leave();
    own.unfenced.insert(own.unfenced.end(), former.processes.begin(), former.processes.end());
    own.memory_lost = own.memory_lost || former.memory_lost;
    if (former.device_failure.empty()) return;
    throw Error(text("hvd::reconfigure ", uuid, ": the GPU of rank ", rank, " (",
                     describe(members[static_cast<std::size_t>(rank)]),
                     ") does not work any more: ", former.device_failure, "; end that process"));
  };
  name_errors(uuid, [&] {
    runtime::replace_job(options, [&](const runtime::RuntimeOptions& settings, const auto& leave) {
      return join_members(uuid, members, instance, rank, settings, *server,
                          [&] { arrived(leave); });
    });
  });
  own.formed.store(true);
  std::erase_if(own.unfenced,
                [&](const ProcessIdentity& one) { return !may_use_memory(one, members); });
  if (own.unfenced.empty() && !own.memory_lost) take_kept().release();
}

}  // namespace hvd
