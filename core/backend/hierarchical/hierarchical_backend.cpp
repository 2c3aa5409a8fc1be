#include "backend/hierarchical/hierarchical_backend.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/hierarchical/host_pipeline.h"
#include "base/cache_line.h"
#include "base/text.h"
#include "hvd/error.h"
#include "transport/node/node.h"

namespace hvd::hierarchical {
namespace {

/// Higher than the score of the flat backend. This backend and shm never serve the same set.
constexpr int kScore = 15;
/// With more process sets across hosts than this, /dev/shm may be full. Opening a channel then
/// fails.
constexpr std::size_t kSetsToExpect = 4;

segment::BufferLayout layout_of(const HierarchicalTuning& tuning) noexcept {
  return {.buffer_bytes = tuning.buffer_bytes, .results = kResults};
}

bool has(OpKind kind) noexcept {
  return kind == OpKind::kAllreduce || kind == OpKind::kAllgather || kind == OpKind::kBroadcast;
}

class HierarchicalChannel final : public Channel {
 public:
  explicit HierarchicalChannel(std::shared_ptr<HostChannelState> host) : host_(std::move(host)) {}

  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    if (host_->messages->abandoned())
      throw Error(text("hierarchical: ", to_string(collective.kind),
                       " launched on a channel that has failed"));
    if (!has(collective.kind))
      throw Error(text("hierarchical: this backend has no ", to_string(collective.kind)));
    return make_work(host_, collective, in, out);
  }

  void abort() noexcept override { host_->abandon(); }

 private:
  const std::shared_ptr<HostChannelState> host_;
};

}  // namespace

HierarchicalBackend::HierarchicalBackend(std::shared_ptr<message::Carrier> carrier,
                                         std::shared_ptr<const host::Node> node,
                                         const HierarchicalTuning& tuning)
    : carrier_(std::move(carrier)), node_(std::move(node)), tuning_(tuning) {
  constexpr std::size_t kLargestSlot = std::size_t{1} << 30;
  const bool valid = tuning.buffer_bytes >= kCacheLine && tuning.buffer_bytes <= kLargestSlot &&
                     tuning.buffer_bytes % kCacheLine == 0 &&
                     tuning.small_bytes <= tuning.buffer_bytes / 2 && tuning.smallest_slice > 0;
  if (!valid) {
    throw UsageError(
        "HierarchicalTuning: expected buffer_bytes a multiple of 64 up to 1 GiB, small_bytes at "
        "most half of it, and smallest_slice above 0");
  }
}

std::size_t HierarchicalBackend::wanted_shared_memory(int local_size) noexcept {
  return kSetsToExpect * segment::ChannelSegment::bytes(static_cast<std::size_t>(local_size),
                                                        layout_of(HierarchicalTuning{}));
}

int HierarchicalBackend::score(const Topology& topology, const ChannelSpec& spec,
                               const Collective& collective) const noexcept {
  if (!has(collective.kind) || spec.device.type != DeviceType::kCpu ||
      collective.op == ReduceOp::kAdasum)
    return 0;
  if (spec.ranks.size() * kCacheLine > tuning_.buffer_bytes)
    return 0;  // the members divide a buffer into parts of at least a cache line
  // This function is called for every negotiated batch, so it passes over the members only once.
  std::vector<bool> used(topology.host_names.size());
  std::size_t hosts = 0;
  for (const int rank : spec.ranks) {
    const auto host =
        static_cast<std::size_t>(topology.host_of_rank[static_cast<std::size_t>(rank)]);
    if (!used[host]) ++hosts;
    used[host] = true;
  }
  return hosts > 1 && hosts < spec.ranks.size() ? kScore : 0;
}

std::unique_ptr<Channel> HierarchicalBackend::open(const ChannelSpec& spec, Peers& peers) {
  HierarchicalTuning tuning = tuning_;
  // A buffer must hold a small allreduce, which takes one round.
  tuning.buffer_bytes = segment::buffer_bytes_for(
      spec.instance, tuning_.buffer_bytes,
      std::max(2 * tuning_.small_bytes / kCacheLine * kCacheLine, spec.ranks.size() * kCacheLine));
  const int max_drivers =
      static_cast<int>(std::max<std::size_t>(1, tuning.buffer_bytes / tuning.smallest_slice));
  HostPlan plan = make_plan(node_->topology(), spec.ranks, spec.set_rank, max_drivers);
  segment::SegmentMembers here{
      .name = node_->name_prefix() + "-hosts" + segment::ChannelSegment::suffix(spec),
      .member = static_cast<std::size_t>(plan.index)};
  for (const int member : plan.local())
    here.ranks.push_back(spec.ranks[static_cast<std::size_t>(member)]);
  auto messages = std::make_shared<message::ChannelMessages>(carrier_, spec, peers);
  // Uses new, because make_shared() would have to move the segment.
  std::shared_ptr<HostChannelState> host(new HostChannelState{
      std::move(plan), tuning, segment::ChannelSegment(std::move(here), layout_of(tuning), peers),
      std::move(messages)});
  return std::make_unique<HierarchicalChannel>(std::move(host));
}

}  // namespace hvd::hierarchical
