#include "backend/shm/shm_backend.h"

#include <algorithm>
#include <utility>

#include "backend/shm/round_work.h"
#include "backend/shm/shm_lane.h"
#include "hvd/error.h"

namespace hvd {
namespace shm {
namespace {

constexpr std::size_t kLine = 64;
/// Below MPI's until it has been measured against it: chosen by name only.
constexpr int kScore = 5;

class ShmChannel final : public Channel {
 public:
  explicit ShmChannel(std::shared_ptr<Lane> lane) : lane_(std::move(lane)) {}
  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in, std::span<std::byte> out) override {
    return make_work(lane_, collective, in, out);
  }
  // Nobody writes to memory of this process, so nothing can be under way.
  void abort() noexcept override {}

 private:
  std::shared_ptr<Lane> lane_;
};

}  // namespace
}  // namespace shm

ShmBackend::ShmBackend(std::string name, const shm::ShmTuning& tuning) : name_(std::move(name)), tuning_(tuning) {
  if (tuning.slot_bytes < shm::kLine || tuning.slot_bytes % shm::kLine != 0 || tuning.direct_bytes > tuning.slot_bytes) {
    throw UsageError("ShmTuning: a slot is a multiple of 64 bytes, and what is reduced directly fits into one");
  }
}

int ShmBackend::score(const Topology& topology, const ChannelSpec& spec, const Collective& collective) const noexcept {
  if (spec.device.type != DeviceType::kCpu || spec.ranks.size() < 2 || collective.op == ReduceOp::kAdasum) return 0;
  if (spec.ranks.size() * shm::kLine > tuning_.slot_bytes) return 0;  // a slot is shared out among the members
  const bool one_host = std::all_of(spec.ranks.begin(), spec.ranks.end(),
                                    [&](int rank) { return topology.same_host(spec.ranks.front(), rank); });
  return one_host ? shm::kScore : 0;
}

std::unique_ptr<Channel> ShmBackend::open(const ChannelSpec& spec, Peers& peers) {
  return std::make_unique<shm::ShmChannel>(std::make_shared<shm::Lane>(name_, spec, peers, tuning_));
}

}  // namespace hvd
