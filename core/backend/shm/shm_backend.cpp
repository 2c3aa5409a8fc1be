#include "backend/shm/shm_backend.h"

#include <algorithm>
#include <utility>

#include "backend/shm/pipelined_work.h"
#include "backend/shm/shm_channel_state.h"
#include "hvd/error.h"

namespace hvd {
namespace shm {
namespace {

/// Higher than the score of the flat backend. See docs/benchmarks.md.
constexpr int kScore = 20;
/// With more process sets on a host than this, /dev/shm may be full. Opening a channel then fails.
constexpr std::size_t kSetsToExpect = 4;

/// With more members the buffers of a channel would take much of /dev/shm.
constexpr std::size_t kFewMembers = 8;

std::size_t round_up(std::size_t bytes) noexcept {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

ShmTuning tuning_for(std::size_t members, ShmTuning tuning) noexcept {
  if (members > kFewMembers)
    tuning.buffer_bytes = round_up(std::max(tuning.buffer_bytes / 2, tuning.small_bytes));
  return tuning;
}

class ShmChannel final : public Channel {
 public:
  explicit ShmChannel(std::shared_ptr<ShmChannelState> channel) : channel_(std::move(channel)) {}
  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    return make_work(channel_, collective, in, out);
  }
  bool needs_polling() const noexcept override { return false; }
  // A peer may still access tensors in this rank's arena. The runtime keeps the tensors of launched
  // Works until the process ends.
  void abort() noexcept override {}

 private:
  std::shared_ptr<ShmChannelState> channel_;
};

}  // namespace
}  // namespace shm

ShmBackend::ShmBackend(std::string name, std::shared_ptr<const SharedArena> arena,
                       const shm::ShmTuning& tuning)
    : name_(std::move(name)),
      tuning_(tuning),
      arenas_(std::make_shared<shm::PeerArenas>(std::move(arena))) {
  if (tuning.buffer_bytes < kCacheLine || tuning.buffer_bytes % kCacheLine != 0 ||
      tuning.small_bytes > tuning.buffer_bytes) {
    throw UsageError(
        "ShmTuning: expected buffer_bytes a multiple of 64, and small_bytes at most as large");
  }
}

ShmBackend::~ShmBackend() = default;

std::size_t ShmBackend::wanted_shared_memory(int local_size) noexcept {
  const auto members = static_cast<std::size_t>(local_size);
  return shm::kSetsToExpect *
         shm::ShmChannelState::segment_bytes(members, shm::tuning_for(members, {}));
}

int ShmBackend::score(const Topology& topology, const ChannelSpec& spec,
                      const Collective& collective) const noexcept {
  if (spec.device.type != DeviceType::kCpu || spec.ranks.size() < 2 ||
      collective.op == ReduceOp::kAdasum)
    return 0;
  if (spec.ranks.size() * kCacheLine > shm::tuning_for(spec.ranks.size(), tuning_).buffer_bytes)
    return 0;  // the members divide a buffer into parts of at least a cache line
  const bool one_host = std::all_of(spec.ranks.begin(), spec.ranks.end(), [&](int rank) {
    return topology.same_host(spec.ranks.front(), rank);
  });
  return one_host ? shm::kScore : 0;
}

std::unique_ptr<Channel> ShmBackend::open(const ChannelSpec& spec, Peers& peers) {
  shm::ShmTuning tuning = shm::tuning_for(spec.ranks.size(), tuning_);
  tuning.buffer_bytes = segment::buffer_bytes_for(
      spec.instance, tuning.buffer_bytes,
      std::max(shm::round_up(tuning.small_bytes), spec.ranks.size() * kCacheLine));
  return std::make_unique<shm::ShmChannel>(
      std::make_shared<shm::ShmChannelState>(name_, spec, peers, arenas_, tuning));
}

}  // namespace hvd
