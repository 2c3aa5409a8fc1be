#include "backend/shm/shm_backend.h"

#include <algorithm>
#include <utility>

#include "backend/shm/pipelined_work.h"
#include "backend/shm/shm_channel_context.h"
#include "hvd/error.h"

namespace hvd {
namespace shm {
namespace {

/// Above MPI's: docs/benchmarks.md.
constexpr int kScore = 20;
/// A job with more process sets of one host than this may find /dev/shm full, and says so.
constexpr std::size_t kSetsToExpect = 4;

class ShmChannel final : public Channel {
 public:
  explicit ShmChannel(std::shared_ptr<ChannelContext> context) : context_(std::move(context)) {}
  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    return make_work(context_, collective, in, out);
  }
  // A peer may still be at work on tensors in this rank's arena: the runtime keeps the memory of
  // what was launched.
  bool needs_polling() const noexcept override { return false; }
  void abort() noexcept override {}

 private:
  std::shared_ptr<ChannelContext> context_;
};

}  // namespace
}  // namespace shm

ShmBackend::ShmBackend(std::string name, std::shared_ptr<const SharedArena> arena,
                       const shm::ShmTuning& tuning)
    : name_(std::move(name)),
      tuning_(tuning),
      arenas_(std::make_shared<shm::PeerArenas>(std::move(arena))) {
  if (tuning.slot_bytes < kCacheLine || tuning.slot_bytes % kCacheLine != 0 ||
      tuning.small_bytes > tuning.slot_bytes) {
    throw UsageError(
        "ShmTuning: a slot is a multiple of 64 bytes, and a small allreduce fits into one");
  }
}

ShmBackend::~ShmBackend() = default;

std::size_t ShmBackend::wanted_shared_memory(int local_size) noexcept {
  return shm::kSetsToExpect *
         shm::ChannelContext::segment_bytes(static_cast<std::size_t>(local_size), {});
}

int ShmBackend::score(const Topology& topology, const ChannelSpec& spec,
                      const Collective& collective) const noexcept {
  if (spec.device.type != DeviceType::kCpu || spec.ranks.size() < 2 ||
      collective.op == ReduceOp::kAdasum)
    return 0;
  if (spec.ranks.size() * kCacheLine > tuning_.slot_bytes)
    return 0;  // a slot is shared out among the members
  const bool one_host = std::all_of(spec.ranks.begin(), spec.ranks.end(), [&](int rank) {
    return topology.same_host(spec.ranks.front(), rank);
  });
  return one_host ? shm::kScore : 0;
}

std::unique_ptr<Channel> ShmBackend::open(const ChannelSpec& spec, Peers& peers) {
  shm::ShmTuning tuning = tuning_;
  tuning.slot_bytes =
      segment::slot_bytes_for(spec.instance, tuning_.slot_bytes,
                              std::max(tuning_.small_bytes / kCacheLine * kCacheLine + kCacheLine,
                                       spec.ranks.size() * kCacheLine));
  return std::make_unique<shm::ShmChannel>(
      std::make_shared<shm::ChannelContext>(name_, spec, peers, arenas_, tuning));
}

}  // namespace hvd
