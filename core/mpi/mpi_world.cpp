#include "mpi/mpi_world.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>
#include <string>

#include "base/config.h"
#include "base/log.h"
#include "hvd/error.h"
#include "mpi/call_watch.h"
#include "mpi/communicator.h"
#include "mpi/environment.h"

namespace hvd::mpi {
namespace {

/// What each rank tells all others when it joins. Plain bytes: all ranks run the same program on
/// the same architecture.
struct Introduction {
  char host[128];
  char boot[64];
  std::uint64_t shm_device;
  std::uint64_t pid;
  std::uint64_t token;
};

struct BoardReport {
  char failure[192];         ///< empty: fine
  std::uint64_t free_bytes;  ///< that segments may take
};

std::uint64_t free_shared_memory() {
  if (SharedSegment::needs_no_room()) return std::numeric_limits<std::uint64_t>::max();
  struct statvfs info = {};
  return ::statvfs("/dev/shm", &info) == 0 ? std::uint64_t{info.f_bavail} * info.f_frsize : 0;
}

template <std::size_t kSize>
void copy_text(const std::string& text, char (&to)[kSize]) {
  const std::size_t length = std::min(text.size(), kSize - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

Introduction introduce() {
  Introduction own = {};
  if (gethostname(own.host, sizeof own.host - 1) != 0) copy_text("unknown-host", own.host);
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  if (std::getline(file, boot)) copy_text(boot, own.boot);
  // Containers of one machine may share its name and not its memory.
  struct stat info = {};
  if (stat("/dev/shm", &info) == 0) own.shm_device = static_cast<std::uint64_t>(info.st_dev);
  own.pid = static_cast<std::uint64_t>(getpid());
  std::random_device random;
  own.token = (static_cast<std::uint64_t>(random()) << 32) | random();
  return own;
}

bool same_host(const Introduction& a, const Introduction& b) {
  return std::strcmp(a.host, b.host) == 0 && std::strcmp(a.boot, b.boot) == 0 &&
         a.shm_device == b.shm_device;
}

/// One name per rank, different exactly where the hosts differ: "node7", and "node7#2" for another
/// host of that name.
std::vector<std::string> host_names(const std::vector<Introduction>& all) {
  std::vector<std::string> names;
  names.reserve(all.size());
  std::vector<std::size_t> first_of_host;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto known =
        std::find_if(first_of_host.begin(), first_of_host.end(),
                     [&](std::size_t first) { return same_host(all[first], all[rank]); });
    if (known != first_of_host.end()) {
      names.push_back(names[*known]);
      continue;
    }
    const auto namesakes = std::count_if(
        first_of_host.begin(), first_of_host.end(),
        [&](std::size_t first) { return std::strcmp(all[first].host, all[rank].host) == 0; });
    std::string name = all[rank].host;
    if (namesakes > 0) name.append("#").append(std::to_string(namesakes + 1));
    names.push_back(std::move(name));
    first_of_host.push_back(rank);
  }
  return names;
}

std::vector<std::string> host_names_for_test(const std::string& list, int size) {
  std::vector<std::string> names;
  std::istringstream stream(list);
  for (std::string name; std::getline(stream, name, ',');) names.push_back(name);
  if (static_cast<int>(names.size()) != size) {
    throw UsageError("HVD_TEST_HOSTS: expected one name for each of the " + std::to_string(size) +
                     " ranks, got " + std::to_string(names.size()) + " in \"" + list + "\"");
  }
  return names;
}

TimePoint now() { return SteadyClock().now(); }

std::string in_seconds(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

// Note [A call that does not return]
// The thread that made it holds the token, so neither the engine nor a handler of the program can
// do anything any more, and what ends a process in order would wait for MPI. What is left: the
// board, which takes no message, for the ranks of this host; a line on stderr; and _exit().

[[noreturn]] void end_process(const std::string& text) noexcept {
  log_message(LogLevel::kFatal,
              text + "; this process ends with code " + std::to_string(kHangExitCode));
  ::_exit(kHangExitCode);
}

// MPI has not told this process its rank, but its launcher may have.
[[noreturn]] void end_start_because(const CallWatch::Hang& hang) noexcept {
  std::string who = "this process";
  for (const char* const name : {"HVD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    const char* const rank = std::getenv(name);
    if (rank == nullptr) continue;
    who = std::string("rank ") + rank;
    break;
  }
  end_process("hvd::init: " + who + " has waited " + in_seconds(hang.lasted) +
              " (HVD_START_TIMEOUT) and " + hang.call +
              " has not returned: a rank has not been started, has ended early, or is stopped; see "
              "which one the others miss");
}

}  // namespace

std::shared_ptr<MpiWorld> MpiWorld::join(const WorldOptions& options) {
  // Before MPI, whose own start waits for all ranks and has no limit.
  const auto deadline = std::chrono::steady_clock::now() + options.start_timeout;
  auto watch = std::make_unique<CallWatch>(options.start_timeout, end_start_because);
  ensure_initialized();
  std::shared_ptr<MpiWorld> world(new MpiWorld);
  world_opened();
  world->control_ =
      std::make_unique<Communicator>(Communicator::duplicate(MPI_COMM_WORLD, deadline));
  world->data_ =
      std::make_unique<Communicator>(Communicator::duplicate(world->control_->get(), deadline));
  world->find_topology(deadline);
  world->set_up_board(options, deadline);
  free_retired_communicators();
  world->watch_ = std::move(watch);
  MpiWorld* const self = world.get();
  world->watch_->watch_calls(
      options.call_timeout,
      [self](const CallWatch::Hang& hang) { self->end_because(hang.call, hang.peer, hang.lasted); },
      [self] { return self->board_->glance(self->topology_.rank).has_value(); });
  return world;
}

// See Note [A call that does not return].
void MpiWorld::end_because(const std::string& call, int peer, Duration lasted) noexcept {
  std::string cause = call + (peer >= 0 ? " with rank " + std::to_string(peer) : "") +
                      " has not returned for " + in_seconds(lasted) +
                      ", as happens when a connection breaks";
  const auto suspect = board_->glance(topology_.rank);
  const int lost = suspect ? suspect->accused.value_or(rank_of_slot(suspect->slot)) : -1;
  if (suspect && suspect->accused) {
    cause += "; what rank " + std::to_string(rank_of_slot(suspect->slot)) +
             " has noticed: " + suspect->cause;
  } else if (suspect) {
    cause += "; lost rank " + std::to_string(lost) + " (host " + topology_.host_name(lost) +
             "): " + suspect->cause;
  } else if (topology_.host_names.size() > 1) {
    cause += "; no rank of this host has ended, so see whether one on another host has";
  }
  const std::string own = "rank " + std::to_string(topology_.rank) + " (host " +
                          topology_.host_name(topology_.rank) + "): ";
  board_->accuse(suspect ? lost : topology_.rank, suspect ? suspect->cause : "lost " + own + cause);
  end_process(own + cause);
}

MpiWorld::~MpiWorld() {
  watch_.reset();
  if (!said_farewell_ || failed_) hvd::mpi::mark_failed();
  world_closed();
}

void MpiWorld::find_topology(std::chrono::steady_clock::time_point deadline) {
  const int rank = control_->rank();
  const int size = control_->size();
  const Introduction own = introduce();
  std::vector<Introduction> all(static_cast<std::size_t>(size));
  control_->allgather(&own, all.data(), static_cast<int>(sizeof own), deadline);

  const auto test_hosts = env_string("TEST_HOSTS");
  topology_ =
      make_topology(rank, test_hosts ? host_names_for_test(*test_hosts, size) : host_names(all));
  if (test_hosts && rank == 0) {
    HVD_LOG(kWarning)
        << "HVD_TEST_HOSTS=" << *test_hosts
        << " is set, which is for tests of hvd: ranks take each other for ranks of other hosts";
  }

  slot_of_rank_.assign(static_cast<std::size_t>(size), -1);
  for (int other = 0; other < size; ++other) {
    if (!topology_.same_host(rank, other)) continue;
    slot_of_rank_[static_cast<std::size_t>(other)] = static_cast<int>(local_ranks_.size());
    local_ranks_.push_back(other);
  }
  // Unique although pids repeat over time and between containers: the first rank of the host has
  // drawn the token.
  const Introduction& first = all[static_cast<std::size_t>(local_ranks_.front())];
  std::ostringstream name;
  name << "/hvd-" << first.pid << '-' << std::hex << first.token;
  board_name_ = name.str();
}

void MpiWorld::set_up_board(const WorldOptions& options,
                            std::chrono::steady_clock::time_point deadline) {
  const int slots = topology_.local_size;
  const int slot = topology_.local_rank;
  std::unique_ptr<host::HostBoard> board;
  BoardReport own = {};
  const auto try_board = [&](auto&& make) {
    try {
      board = std::make_unique<host::HostBoard>(make(board_name_, slots));
      board->enter(slot, now());
    } catch (const Error& error) {
      copy_text(error.what(), own.failure);
    }
  };
  if (!options.host_board) copy_text("switched off", own.failure);
  own.free_bytes = free_shared_memory();

  // Three steps, each ended by an exchange that no rank leaves before all have entered: make, map,
  // remove the name.
  std::vector<BoardReport> all(static_cast<std::size_t>(topology_.size));
  const auto exchange = [&] {
    control_->allgather(&own, all.data(), static_cast<int>(sizeof own), deadline);
  };
  const bool wanted = slots > 1 && options.host_board;
  if (wanted && slot == 0) try_board(host::HostBoard::create);
  exchange();
  const BoardReport& makers = all[static_cast<std::size_t>(local_ranks_.front())];
  if (wanted && slot != 0 && makers.failure[0] == '\0') try_board(host::HostBoard::attach);
  exchange();
  if (board != nullptr) board->unlink();

  // A rank that is alone on its host needs no board that others share.
  std::vector<const char*> failure_of_host(topology_.host_names.size(), "");
  std::vector<int> ranks_of_host(topology_.host_names.size(), 0);
  free_of_host_.assign(topology_.host_names.size(), 0);
  for (int rank = 0; rank < topology_.size; ++rank) {
    const auto host =
        static_cast<std::size_t>(topology_.host_of_rank[static_cast<std::size_t>(rank)]);
    const BoardReport& report = all[static_cast<std::size_t>(rank)];
    if (++ranks_of_host[host] == 1) free_of_host_[host] = report.free_bytes;
    if (failure_of_host[host][0] == '\0') failure_of_host[host] = report.failure;
  }
  all_boards_shared_ = true;
  for (std::size_t host = 0; host < ranks_of_host.size(); ++host) {
    all_boards_shared_ =
        all_boards_shared_ && (ranks_of_host[host] == 1 || failure_of_host[host][0] == '\0');
  }
  const char* const failure = failure_of_host[static_cast<std::size_t>(
      topology_.host_of_rank[static_cast<std::size_t>(topology_.rank)])];
  if (slots > 1 && failure[0] == '\0') {
    board_ = std::move(board);
    board_->watch_others(now());
    board_shared_ = true;
    return;
  }
  if (slots > 1 && slot == 0) {
    HVD_LOG(kWarning) << "the ranks of this host share no memory and will poll for messages, and a "
                         "dead rank is noticed late: "
                      << failure;
  }
  board_ = std::make_unique<host::HostBoard>(host::HostBoard::solitary());
  board_->enter(0, now());
  board_shared_ = slots == 1;
}

void MpiWorld::ring(int world_rank) noexcept {
  if (world_rank == topology_.rank) return board_->own_bell().ring();
  if (!board_shared_ || world_rank < 0 || world_rank >= topology_.size) return;
  const int slot = slot_of_rank_[static_cast<std::size_t>(world_rank)];
  if (slot >= 0) board_->bell(slot).ring();
}

void MpiWorld::announce(int world_rank) noexcept {
  if (rung_by_all())
    board_->mail(slot_of_rank_[static_cast<std::size_t>(world_rank)])
        .fetch_add(1, std::memory_order_release);
}

LockWords* MpiWorld::lock_words(int world_rank) noexcept {
  const int slot = slot_of_rank_[static_cast<std::size_t>(world_rank)];
  return all_boards_shared_ && slot >= 0 ? &board_->lock_words(slot) : nullptr;
}

LockWords* MpiWorld::outside_lock_words() noexcept {
  return all_boards_shared_ && topology_.local_size < topology_.size ? &board_->outside_lock_words()
                                                                     : nullptr;
}

void MpiWorld::allgather(const void* mine, void* all, int bytes,
                         std::chrono::milliseconds timeout) const {
  control_->allgather(mine, all, bytes, std::chrono::steady_clock::now() + timeout);
}

void MpiWorld::farewell() noexcept {
  said_farewell_ = true;
  board_->farewell();
}

void MpiWorld::mark_failed() noexcept {
  failed_ = true;
  hvd::mpi::mark_failed();
}

}  // namespace hvd::mpi
