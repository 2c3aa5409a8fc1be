#include "transport/node/node.h"

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include <utility>

#include "base/config.h"
#include "base/log.h"
#include "base/process_watch.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::host {
namespace {

/// Sent by each rank to all others when it joins. Plain bytes, since all ranks run the same program
/// on the same architecture.
struct HostReport {
  char host[128];
  char boot[64];
  std::uint64_t shm_device;
  std::uint64_t pid;
  std::uint64_t token;
};

struct ControlSegmentReport {
  char failure[192];         ///< empty on success
  std::uint64_t free_bytes;  ///< available for segments
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

HostReport own_host_report() {
  HostReport own = {};
  if (gethostname(own.host, sizeof own.host - 1) != 0) copy_text("unknown-host", own.host);
  copy_text(boot_id(), own.boot);
  // Containers on one machine may have the same host name without sharing memory.
  struct stat info = {};
  if (stat("/dev/shm", &info) == 0) own.shm_device = static_cast<std::uint64_t>(info.st_dev);
  own.pid = static_cast<std::uint64_t>(getpid());
  std::random_device random;
  own.token = (static_cast<std::uint64_t>(random()) << 32) | random();
  return own;
}

bool same_host(const HostReport& a, const HostReport& b) {
  return std::strcmp(a.host, b.host) == 0 && std::strcmp(a.boot, b.boot) == 0 &&
         a.shm_device == b.shm_device;
}

/// Returns the host of each rank, with distinct names for distinct hosts: "node7", and "node7#2"
/// for another host of that name.
std::vector<std::string> host_names(const std::vector<HostReport>& all) {
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
    if (namesakes > 0) name += text("#", namesakes + 1);
    names.push_back(std::move(name));
    first_of_host.push_back(rank);
  }
  return names;
}

std::vector<std::string> host_names_for_test(const std::string& list, int size) {
  const auto parts = split_text(list, ',');
  std::vector<std::string> names(parts.begin(), parts.end());
  if (static_cast<int>(names.size()) != size) {
    throw UsageError(text("HVD_TEST_HOSTS: expected one name for each of the ", size,
                          " ranks, got ", names.size(), " in \"", list, "\""));
  }
  return names;
}

TimePoint now() { return SteadyClock().now(); }

}  // namespace

std::shared_ptr<Node> Node::join(int rank, int size, const Exchange& exchange, bool share_memory) {
  std::shared_ptr<Node> node(new Node);
  node->find_topology(rank, size, exchange);
  node->set_up_control_segment(exchange, share_memory);
  return node;
}

void Node::find_topology(int rank, int size, const Exchange& exchange) {
  const HostReport own = own_host_report();
  std::vector<HostReport> all(static_cast<std::size_t>(size));
  exchange(&own, all.data(), sizeof own);

  const auto test_hosts = env_string("TEST_HOSTS");
  topology_ =
      make_topology(rank, test_hosts ? host_names_for_test(*test_hosts, size) : host_names(all));
  if (test_hosts && rank == 0) {
    HVD_LOG(kWarning)
        << "HVD_TEST_HOSTS=" << *test_hosts
        << " is set, which is for tests of hvd: ranks treat each other as ranks of other hosts";
  }

  slot_of_rank_.assign(static_cast<std::size_t>(size), -1);
  for (int other = 0; other < size; ++other) {
    if (!topology_.same_host(rank, other)) continue;
    slot_of_rank_[static_cast<std::size_t>(other)] = static_cast<int>(local_ranks_.size());
    local_ranks_.push_back(other);
  }
  // The random token of the host's first rank makes the name unique, because pids repeat over time
  // and between containers.
  const HostReport& first = all[static_cast<std::size_t>(local_ranks_.front())];
  std::ostringstream name;
  name << SharedSegment::kPrefix << first.pid << '-' << std::hex << first.token;
  name_prefix_ = name.str();
}

void Node::set_up_control_segment(const Exchange& exchange, bool share_memory) {
  const int slots = topology_.local_size;
  const int slot = topology_.local_rank;
  std::unique_ptr<ControlSegment> control_segment;
  ControlSegmentReport own = {};
  const auto try_control_segment = [&](auto&& make) {
    try {
      control_segment = std::make_unique<ControlSegment>(make(name_prefix_, slots));
      control_segment->enter(slot, now());
    } catch (const Error& error) {
      copy_text(error.what(), own.failure);
    }
  };
  if (!share_memory) copy_text("switched off", own.failure);
  own.free_bytes = free_shared_memory();

  // Three steps: make the segment, map it, remove its name. The exchange after each step acts as a
  // barrier.
  std::vector<ControlSegmentReport> all(static_cast<std::size_t>(topology_.size));
  const auto exchange_reports = [&] { exchange(&own, all.data(), sizeof own); };
  const bool wanted = slots > 1 && share_memory;
  if (wanted && slot == 0) {
    SharedSegment::remove_abandoned();
    try_control_segment(ControlSegment::create);
  }
  exchange_reports();
  const ControlSegmentReport& makers = all[static_cast<std::size_t>(local_ranks_.front())];
  if (wanted && slot != 0 && makers.failure[0] == '\0') try_control_segment(ControlSegment::attach);
  exchange_reports();
  if (control_segment != nullptr) control_segment->unlink();

  // A rank that is alone on its host needs no shared control segment.
  std::vector<const char*> failure_of_host(topology_.host_names.size(), "");
  std::vector<int> ranks_of_host(topology_.host_names.size(), 0);
  free_of_host_.assign(topology_.host_names.size(), 0);
  for (int rank = 0; rank < topology_.size; ++rank) {
    const auto host =
        static_cast<std::size_t>(topology_.host_of_rank[static_cast<std::size_t>(rank)]);
    const ControlSegmentReport& report = all[static_cast<std::size_t>(rank)];
    if (++ranks_of_host[host] == 1) free_of_host_[host] = report.free_bytes;
    if (failure_of_host[host][0] == '\0') failure_of_host[host] = report.failure;
  }
  all_control_segments_shared_ = true;
  for (std::size_t host = 0; host < ranks_of_host.size(); ++host) {
    all_control_segments_shared_ = all_control_segments_shared_ &&
                                   (ranks_of_host[host] == 1 || failure_of_host[host][0] == '\0');
  }
  const char* const failure = failure_of_host[static_cast<std::size_t>(
      topology_.host_of_rank[static_cast<std::size_t>(topology_.rank)])];
  if (slots > 1 && failure[0] == '\0') {
    control_segment_ = std::move(control_segment);
    control_segment_->watch_others(now());
    control_segment_shared_ = true;
    return;
  }
  if (slots > 1 && slot == 0) {
    HVD_LOG(kWarning) << "the ranks of this host share no memory and will poll for messages, and a "
                         "dead rank is noticed late: "
                      << failure;
  }
  control_segment_ = std::make_unique<ControlSegment>(ControlSegment::solitary());
  control_segment_->enter(0, now());
  control_segment_shared_ = slots == 1;
}

void Node::ring(int world_rank) noexcept {
  if (world_rank == topology_.rank) return control_segment_->own_doorbell().ring();
  if (!control_segment_shared_ || world_rank < 0 || world_rank >= topology_.size) return;
  const int slot = slot_of_rank_[static_cast<std::size_t>(world_rank)];
  if (slot >= 0) control_segment_->doorbell(slot).ring();
}

void Node::announce(int world_rank) noexcept {
  if (rung_by_all())
    control_segment_->message_count(slot_of_rank_[static_cast<std::size_t>(world_rank)])
        .fetch_add(1, std::memory_order_release);
}

ArrivalFlags* Node::arrival_flags(int world_rank) noexcept {
  const int slot = slot_of_rank_[static_cast<std::size_t>(world_rank)];
  return all_control_segments_shared_ && slot >= 0 ? &control_segment_->arrival_flags(slot)
                                                   : nullptr;
}

ArrivalFlags* Node::remote_arrival_flags() noexcept {
  return all_control_segments_shared_ && topology_.local_size < topology_.size
             ? &control_segment_->remote_arrival_flags()
             : nullptr;
}

}  // namespace hvd::host
