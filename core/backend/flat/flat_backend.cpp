#include "backend/flat/flat_backend.h"

#include <utility>

#include "backend/flat/flat_work.h"
#include "backend/sizes.h"
#include "base/cache_line.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::flat {
namespace {

constexpr int kScore = 10;

/// The Work of an empty collective.
class EmptyWork final : public Work {
 public:
  bool progress() override { return true; }
};

class FlatChannel final : public Channel {
 public:
  explicit FlatChannel(std::shared_ptr<FlatChannelState> state) : state_(std::move(state)) {}

  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    if (state_->abandoned())
      throw Error(
          text("flat: ", to_string(collective.kind), " launched on a channel that has failed"));
    check_arguments("flat", collective, state_->rank(), state_->size(), in, out);
    if (is_empty(collective)) return std::make_unique<EmptyWork>();
    return make_work(state_, collective, in, out);
  }

  void abort() noexcept override { static_cast<void>(state_->abandon()); }

 private:
  std::shared_ptr<FlatChannelState> state_;
};

}  // namespace

FlatBackend::FlatBackend(std::shared_ptr<message::Carrier> carrier, const FlatTuning& tuning)
    : carrier_(std::move(carrier)), name_(carrier_->name()), tuning_(tuning) {
  constexpr std::size_t kLargestChunk = std::size_t{1} << 30;
  const auto is_length = [](std::size_t bytes) {
    return bytes >= kCacheLine && bytes <= kLargestChunk && bytes % kCacheLine == 0;
  };
  const bool valid = is_length(tuning.chunk_bytes) && is_length(tuning.slice_bytes) &&
                     tuning.direct_bytes <= kLargestChunk &&
                     tuning.direct_pair_bytes <= kLargestChunk && tuning.windows >= 1 &&
                     tuning.windows <= kMaxWindows && tuning.outstanding_chunks >= 1;
  if (!valid)
    throw UsageError(
        "FlatTuning: expected chunk_bytes and slice_bytes multiples of 64 up to 1 GiB, 1 to 4 "
        "windows and at least 1 outstanding chunk");
}

int FlatBackend::score(const Topology&, const ChannelSpec& spec,
                       const Collective& collective) const noexcept {
  if (spec.device.type != DeviceType::kCpu || spec.ranks.size() < 2) return 0;
  if (collective.kind == OpKind::kBarrier || collective.kind == OpKind::kJoin ||
      collective.op == ReduceOp::kAdasum)
    return 0;
  return kScore;
}

std::unique_ptr<Channel> FlatBackend::open(const ChannelSpec& spec, Peers& peers) {
  return std::make_unique<FlatChannel>(
      std::make_shared<FlatChannelState>(carrier_, spec, peers, tuning_));
}

}  // namespace hvd::flat
