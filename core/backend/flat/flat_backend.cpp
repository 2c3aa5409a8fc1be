#include "backend/flat/flat_backend.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "backend/flat/flat_work.h"
#include "base/cache_line.h"
#include "hvd/error.h"

namespace hvd::flat {
namespace {

constexpr int kScore = 10;

std::int64_t total(std::span<const std::int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

/// Elements of a collective on this rank.
struct Sizes {
  std::int64_t in = 0;
  std::int64_t out = 0;
  bool is_empty = false;  ///< on all ranks, which agree about it
};

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
      throw Error("flat: " + std::string(to_string(collective.kind)) +
                  " launched on a channel that has failed");
    const Sizes sizes = sizes_of(collective);
    const auto element = static_cast<std::int64_t>(size_of(collective.dtype));
    const bool reads_input =
        collective.kind != OpKind::kBroadcast || collective.root == state_->rank();
    if (reads_input) require(collective, "input", sizes.in * element, in.size());
    require(collective, "output", sizes.out * element, out.size());
    if (sizes.is_empty) return std::make_unique<EmptyWork>();
    switch (collective.kind) {
      case OpKind::kAllreduce:
        return make_allreduce(state_, collective, in, out);
      case OpKind::kBroadcast:
        return make_broadcast(state_, collective, in, out);
      case OpKind::kAllgather:
        return make_allgather(state_, collective, in, out);
      case OpKind::kReducescatter:
        return make_reducescatter(state_, collective, in, out);
      default:
        return make_alltoall(state_, collective, in, out);
    }
  }

  void abort() noexcept override { static_cast<void>(state_->abandon()); }

 private:
  static void require(const Collective& collective, const char* what, std::int64_t expected,
                      std::size_t got) {
    if (expected >= 0 && static_cast<std::size_t>(expected) == got) return;
    throw Error("flat: " + std::string(to_string(collective.kind)) + ": expected an " + what +
                " of " + std::to_string(expected) + " bytes, got " + std::to_string(got));
  }

  void require_counts(const Collective& collective, std::span<const std::int64_t> counts) const {
    const auto ranks = static_cast<std::size_t>(state_->size());
    const bool valid =
        counts.size() == ranks &&
        std::all_of(counts.begin(), counts.end(), [](std::int64_t count) { return count >= 0; });
    if (valid) return;
    throw Error("flat: " + std::string(to_string(collective.kind)) + ": expected " +
                std::to_string(ranks) + " counts, none negative, got " +
                std::to_string(counts.size()) + " counts");
  }

  Sizes sizes_of(const Collective& collective) const {
    const auto own = static_cast<std::size_t>(state_->rank());
    const std::int64_t count = collective.count;
    switch (collective.kind) {
      case OpKind::kAllreduce:
        return {count, count, count == 0};
      case OpKind::kBroadcast: {
        if (collective.root < 0 || collective.root >= state_->size()) {
          throw Error("flat: broadcast: root " + std::to_string(collective.root) + " of " +
                      std::to_string(state_->size()) + " ranks");
        }
        return {count, count, count == 0};
      }
      case OpKind::kAllgather: {
        require_counts(collective, collective.counts);
        const std::int64_t all = total(collective.counts);
        return {collective.counts[own], all, all == 0};
      }
      case OpKind::kReducescatter: {
        require_counts(collective, collective.counts);
        const std::int64_t all = total(collective.counts);
        return {all, collective.counts[own], all == 0};
      }
      case OpKind::kAlltoall:
        require_counts(collective, collective.counts);
        require_counts(collective, collective.send_counts);
        // A rank knows its own sizes only. The Work runs on every rank and sends no empty message.
        return {total(collective.send_counts), total(collective.counts), false};
      default:
        throw Error("flat: this backend has no " + std::string(to_string(collective.kind)));
    }
  }

  std::shared_ptr<FlatChannelState> state_;
};

}  // namespace

FlatBackend::FlatBackend(std::shared_ptr<message::Carrier> carrier, const FlatTuning& tuning)
    : carrier_(std::move(carrier)), name_(carrier_->name()), tuning_(tuning) {
  constexpr std::size_t kLargestChunk = std::size_t{1} << 30;
  const bool valid = tuning.chunk_bytes >= kCacheLine && tuning.chunk_bytes <= kLargestChunk &&
                     tuning.chunk_bytes % kCacheLine == 0 && tuning.direct_bytes <= kLargestChunk &&
                     tuning.direct_pair_bytes <= kLargestChunk && tuning.windows >= 1 &&
                     tuning.windows <= kMostWindows && tuning.outstanding_chunks >= 1;
  if (!valid)
    throw UsageError(
        "FlatTuning: expected chunk_bytes a multiple of 64 up to 1 GiB, 1 to 4 windows and at "
        "least "
        "1 outstanding chunk");
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
