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

struct NodeJoin::HostReport {
  char host[128];
  char boot[64];
  std::uint64_t shm_device;
  std::uint64_t pid;
  std::uint64_t token;
};

struct NodeJoin::SegmentReport {
  char failure[192];         ///< empty on success
  std::uint64_t free_bytes;  ///< available for segments
};

namespace {

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

/// @throws hvd::Error when a rank has sent another number of bytes
template <class Report>
std::vector<Report> reports_of(const Reports& reports, std::size_t size) {
  std::vector<Report> all(size);
  for (std::size_t rank = 0; rank < size; ++rank) {
    const auto bytes = reports(rank);
    if (bytes.size() != sizeof(Report)) {
      throw Error(text("hvd::init: rank ", rank, " sent ", bytes.size(), " bytes, expected ",
                       sizeof(Report), "; start the same program everywhere"));
    }
    std::memcpy(&all[rank], bytes.data(), sizeof(Report));
  }
  return all;
}

}  // namespace

NodeJoin::HostReport NodeJoin::own_host_report() {
  HostReport own = {};
  if (gethostname(own.host, sizeof own.host - 1) != 0) copy_text("unknown-host", own.host);
  copy_text(boot_id(), own.boot);
  // Containers on one machine may have the same host name but no shared memory.
  struct stat info = {};
  if (stat("/dev/shm", &info) == 0) own.shm_device = static_cast<std::uint64_t>(info.st_dev);
  own.pid = static_cast<std::uint64_t>(getpid());
  std::random_device random;
  own.token = (static_cast<std::uint64_t>(random()) << 32) | random();
  return own;
}

bool NodeJoin::same_host(const HostReport& a, const HostReport& b) {
  return std::strcmp(a.host, b.host) == 0 && std::strcmp(a.boot, b.boot) == 0 &&
         a.shm_device == b.shm_device;
}

/// Returns the host of each rank, with distinct names for distinct hosts: "node7", and "node7#2"
/// for another host of that name.
std::vector<std::string> NodeJoin::host_names(const std::vector<HostReport>& all) {
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

NodeJoin::NodeJoin(int rank, int size, bool share_memory)
    : rank_(rank),
      size_(static_cast<std::size_t>(size)),
      share_memory_(share_memory),
      node_(new Node),
      host_report_(std::make_unique<HostReport>(own_host_report())),
      segment_report_(std::make_unique<SegmentReport>()) {
  if (!share_memory) copy_text("switched off", segment_report_->failure);
}

NodeJoin::~NodeJoin() = default;

std::span<const std::byte> NodeJoin::host_report() const noexcept {
  return std::as_bytes(std::span(host_report_.get(), 1));
}

std::span<const std::byte> NodeJoin::segment_report() const noexcept {
  return std::as_bytes(std::span(segment_report_.get(), 1));
}

std::shared_ptr<Node> Node::join(int rank, int size, const Exchange& exchange, bool share_memory) {
  NodeJoin joining(rank, size, share_memory);
  std::vector<std::byte> all;
  const auto exchanged = [&](std::span<const std::byte> mine) -> Reports {
    all.resize(mine.size() * static_cast<std::size_t>(size));
    exchange(mine.data(), all.data(), mine.size());
    return [&all, bytes = mine.size()](std::size_t other) {
      return std::span(all).subspan(other * bytes, bytes);
    };
  };
  const auto made = joining.make_segment(exchanged(joining.host_report()));
  const auto mapped = joining.map_segment(exchanged(made));
  return joining.finish(exchanged(mapped));
}

void NodeJoin::find_topology(const std::vector<HostReport>& all) {
  const auto test_hosts = env_string("TEST_HOSTS");
  const int size = static_cast<int>(size_);
  node_->topology_ =
      make_topology(rank_, test_hosts ? host_names_for_test(*test_hosts, size) : host_names(all));
  if (test_hosts && rank_ == 0) {
    HVD_LOG(kWarning)
        << "HVD_TEST_HOSTS=" << *test_hosts
        << " is set, which is for tests of hvd: ranks treat each other as ranks of other hosts";
  }
  node_->slot_of_rank_.assign(size_, -1);
  for (int other = 0; other < size; ++other) {
    if (!topology().same_host(rank_, other)) continue;
    node_->slot_of_rank_[static_cast<std::size_t>(other)] =
        static_cast<int>(node_->local_ranks_.size());
    node_->local_ranks_.push_back(other);
  }
  // The random token of the host's first rank makes the name unique, because pids repeat over time
  // and between containers.
  const HostReport& first = all[static_cast<std::size_t>(node_->local_ranks_.front())];
  std::ostringstream name;
  name << SharedSegment::kPrefix << first.pid << '-' << std::hex << first.token;
  node_->name_prefix_ = name.str();
}

template <class Make>
void NodeJoin::try_segment(Make&& make) {
  try {
    segment_ = std::make_unique<ControlSegment>(make(node_->name_prefix_, topology().local_size));
    segment_->enter(topology().local_rank, now());
  } catch (const Error& error) {
    copy_text(error.what(), segment_report_->failure);
  }
}

std::span<const std::byte> NodeJoin::make_segment(const Reports& hosts) {
  find_topology(reports_of<HostReport>(hosts, size_));
  segment_report_->free_bytes = free_shared_memory();
  if (topology().local_size > 1 && topology().local_rank == 0 && share_memory_) {
    SharedSegment::remove_abandoned();
    try_segment(ControlSegment::create);
  }
  return segment_report();
}

std::span<const std::byte> NodeJoin::map_segment(const Reports& made) {
  const auto all = reports_of<SegmentReport>(made, size_);
  const SegmentReport& makers = all[static_cast<std::size_t>(node_->local_ranks_.front())];
  if (topology().local_size > 1 && topology().local_rank != 0 && share_memory_ &&
      makers.failure[0] == '\0')
    try_segment(ControlSegment::attach);
  return segment_report();
}

std::shared_ptr<Node> NodeJoin::finish(const Reports& mapped) {
  const auto all = reports_of<SegmentReport>(mapped, size_);
  if (segment_ != nullptr) segment_->unlink();

  const int slots = topology().local_size;
  // A rank that is alone on its host needs no shared control segment.
  std::vector<const char*> failure_of_host(topology().host_names.size(), "");
  std::vector<int> ranks_of_host(topology().host_names.size(), 0);
  node_->free_of_host_.assign(topology().host_names.size(), 0);
  for (int rank = 0; rank < topology().size; ++rank) {
    const auto host =
        static_cast<std::size_t>(topology().host_of_rank[static_cast<std::size_t>(rank)]);
    const SegmentReport& report = all[static_cast<std::size_t>(rank)];
    if (++ranks_of_host[host] == 1) node_->free_of_host_[host] = report.free_bytes;
    if (failure_of_host[host][0] == '\0') failure_of_host[host] = report.failure;
  }
  node_->all_control_segments_shared_ = true;
  for (std::size_t host = 0; host < ranks_of_host.size(); ++host) {
    node_->all_control_segments_shared_ =
        node_->all_control_segments_shared_ &&
        (ranks_of_host[host] == 1 || failure_of_host[host][0] == '\0');
  }
  const char* const failure = failure_of_host[static_cast<std::size_t>(
      topology().host_of_rank[static_cast<std::size_t>(topology().rank)])];
  if (slots > 1 && failure[0] == '\0') {
    node_->control_segment_ = std::move(segment_);
    node_->control_segment_->watch_others(now());
    node_->control_segment_shared_ = true;
    return node_;
  }
  if (slots > 1 && topology().local_rank == 0) {
    HVD_LOG(kWarning) << "the ranks of this host share no memory and will poll for messages, and a "
                         "dead rank is noticed late: "
                      << failure;
  }
  node_->control_segment_ = std::make_unique<ControlSegment>(ControlSegment::solitary());
  node_->control_segment_->enter(0, now());
  node_->control_segment_shared_ = slots == 1;
  return node_;
}

Node::~Node() {
  if (topology_.local_rank == 0) SharedSegment::remove_abandoned();
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

std::optional<MessageBoxes> Node::message_boxes(int world_rank) noexcept {
  const int slot = slot_of_rank_[static_cast<std::size_t>(world_rank)];
  const bool shared = control_segment_shared_ && control_segment_->has_message_boxes();
  if (!shared || slot < 0 || slot == topology_.local_rank) return std::nullopt;
  return MessageBoxes{control_segment_->message_box(topology_.local_rank, slot),
                      control_segment_->message_box(slot, topology_.local_rank)};
}

void Node::announce_mail(int world_rank) noexcept {
  HVD_EXPECT(control_segment_shared_, "the ranks of this host share the control segment");
  control_segment_->mail_count(slot_of_rank_[static_cast<std::size_t>(world_rank)])
      .fetch_add(1, std::memory_order_seq_cst);
}

// The sender announces a message and then reads this flag. The receiver sets the flag and then
// reads the announcements. All four accesses are sequentially consistent, so at least one of the
// two reads the other's value, and no message is missed.
void Node::await_lazy_mail(bool awaits) noexcept {
  if (!control_segment_shared_) return;
  control_segment_->awaits_lazy_mail(topology_.local_rank).store(awaits, std::memory_order_seq_cst);
}

bool Node::awaits_lazy_mail(int world_rank) noexcept {
  return control_segment_->awaits_lazy_mail(slot_of_rank_[static_cast<std::size_t>(world_rank)])
      .load(std::memory_order_seq_cst);
}

ArrivalFlags* Node::arrival_flags(int world_rank, int flag) noexcept {
  const int slot = slot_of_rank_[static_cast<std::size_t>(world_rank)];
  return all_control_segments_shared_ && slot >= 0 ? &control_segment_->arrival_flags(slot, flag)
                                                   : nullptr;
}

ArrivalFlags* Node::remote_arrival_flags() noexcept {
  return all_control_segments_shared_ && topology_.local_size < topology_.size
             ? &control_segment_->remote_arrival_flags()
             : nullptr;
}

}  // namespace hvd::host
