#include "engine/queue_factory.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "backend/backend.h"
#include "backend/staged/host_staged_channel.h"
#include "base/text.h"
#include "engine/device_self.h"
#include "engine/device_staging.h"
#include "engine/host_staging.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

constexpr std::string_view kDeviceBackend = "nccl";
constexpr std::string_view kDeviceSelf = "self, on a GPU";  // queue of a set of one rank
/// Instance of the host-memory channel that a staged channel owns.
constexpr int kStagingInstance = 2;
static_assert(kUrgentInstance < kMaxInstances);

bool on_device(const Batch& batch) noexcept { return batch.spec().device.type != DeviceType::kCpu; }

/// Small operations that must not fuse use a second channel, so that they overtake gradients. All
/// ranks agree on counts and `alone`. Overtaking does not help larger tensors.
bool urgent(const Batch& batch) noexcept {
  const Collective& collective = batch.collective();
  const bool small =
      static_cast<std::size_t>(collective.count) * size_of(collective.dtype) <= kMaxUrgentBytes;
  return small && batch.request().alone && batch.spec().ranks.size() > 1 &&
         (collective.kind == OpKind::kAllreduce || collective.kind == OpKind::kAllgather);
}

/// The collective that a backend must support for a batch. Adasum is a composite of alltoall,
/// allreduce and allgather on one channel; a backend that supports alltoall supports the others.
Collective needed_for(const Batch& batch) {
  Collective collective = batch.collective();
  if (collective.op == ReduceOp::kAdasum) {
    collective.op = ReduceOp::kSum;
    collective.kind = OpKind::kAlltoall;
  }
  return collective;
}

class BackendQueues final : public QueueFactory {
 public:
  BackendQueues(QueueParts parts, std::vector<std::shared_ptr<Backend>> backends,
                std::optional<std::string> forced_backend)
      : parts_(std::move(parts)),
        backends_(std::move(backends)),
        forced_backend_(std::move(forced_backend)),
        buffers_(parts_.arena) {}

  std::string choose(const Batch& batch) const override {
    if (on_device(batch)) {
      return runs_on_device_self(batch) ? std::string(kDeviceSelf) : device_choice(batch).name();
    }
    const std::string backend(host_backend(batch.spec(), batch).name());
    return urgent(batch) ? backend + ", urgent" : backend;
  }

  ChannelQueue open(const Batch& batch) override {
    if (on_device(batch)) return open_on_device(batch);
    ChannelSpec spec = batch.spec();
    if (urgent(batch)) spec.instance = kUrgentInstance;
    ChannelQueue queue{choose(batch), host_backend(spec, batch).open(spec, parts_.peers),
                       std::make_unique<HostStaging>(buffers_)};
    queue.urgent = urgent(batch);
    return queue;
  }

  void keep_buffers_for(std::span<const Batch* const> batches) override {
    std::size_t largest = 0;
    for (const Batch* const batch : batches) {
      if (on_device(*batch) || !batch->buffered()) continue;
      largest = std::max({largest, batch->in_bytes(), batch->out_bytes()});
    }
    // At least 64, because no buffer of the pool is smaller than a cache line.
    buffers_.trim(std::max<std::size_t>(largest, 64));
  }

 private:
  /// The backend for tensors on a GPU, and whether they are staged.
  struct DeviceChoice {
    Backend& backend;
    bool staged = false;  // in the host's memory
    std::string name() const { return std::string(backend.name()) + (staged ? ", staged" : ""); }
  };

  ChannelSpec device_spec(const Batch& batch) const {
    if (!parts_.device) throw Error("a plan names a tensor on a GPU, and this rank has none");
    ChannelSpec spec = batch.spec();
    spec.device.index = parts_.device->device();
    return spec;
  }
  static ChannelSpec staging_spec(const ChannelSpec& device) {
    ChannelSpec spec = device;
    spec.device = {};
    spec.instance = kStagingInstance;
    return spec;
  }

  /// The backend with the highest score above 0, the first one if several are equal; null when no
  /// score is above 0.
  /// @param forced the only backend to consider; null: all
  Backend* best_backend(const ChannelSpec& spec, const Collective& collective,
                        const std::string* forced) const {
    Backend* best = nullptr;
    int best_score = 0;
    for (const auto& backend : backends_) {
      if (forced != nullptr && backend->name() != *forced) continue;
      const int score = backend->score(parts_.topology, spec, collective);
      if (score <= best_score) continue;
      best = backend.get();
      best_score = score;
    }
    return best;
  }
  Backend* device_backend(const ChannelSpec& spec, const Collective& collective) const {
    return best_backend(spec, collective, forced_backend_ ? &*forced_backend_ : nullptr);
  }

  // If no backend supports tensors on a GPU, chooses one for the host's memory, which stages them.
  DeviceChoice device_choice(const Batch& batch) const {
    const ChannelSpec spec = device_spec(batch);
    if (Backend* const own = device_backend(spec, batch.collective())) return {*own};
    return {host_backend(staging_spec(spec), batch), true};
  }

  /// Whether gradients use this queue, so that its memory is allocated ahead of use. Operations
  /// that NCCL lacks use another queue beside NCCL's, which carries no gradients.
  bool carries_gradients(const DeviceChoice& choice, const ChannelSpec& spec) const {
    return (choice.staged ? nullptr : &choice.backend) == device_backend(spec, {.count = 1});
  }

  ChannelQueue open_on_device(const Batch& batch) {
    if (runs_on_device_self(batch)) {
      const ChannelSpec host = staging_spec(device_spec(batch));
      auto [channel, staging] =
          make_device_self(parts_.device, host_backend(host, batch).open(host, parts_.peers));
      return {std::string(kDeviceSelf), std::move(channel), std::move(staging)};
    }
    const DeviceChoice choice = device_choice(batch);
    const ChannelSpec spec = device_spec(batch);
    std::unique_ptr<Channel> channel =
        choice.staged ? open_staged(choice, spec) : choice.backend.open(spec, parts_.peers);
    auto staging = std::make_unique<DeviceStaging>(
        *parts_.device, *channel, !choice.staged,
        carries_gradients(choice, spec) ? device::fusion_buffer_bytes(parts_.fusion_threshold) : 0);
    return {choice.name(), std::move(channel), std::move(staging), !choice.staged};
  }

  std::unique_ptr<Channel> open_staged(const DeviceChoice& choice, const ChannelSpec& spec) {
    return staged::make_host_staged_channel(
        choice.backend.open(staging_spec(spec), parts_.peers), parts_.device, spec, parts_.arena,
        {.allocates_in_advance = carries_gradients(choice, spec)});
  }

  Backend& host_backend(const ChannelSpec&, const Batch&) const;

  const QueueParts parts_;
  const std::vector<std::shared_ptr<Backend>> backends_;
  const std::optional<std::string> forced_backend_;
  FusionBufferPool buffers_;
};

Backend& BackendQueues::host_backend(const ChannelSpec& spec, const Batch& batch) const {
  const Collective collective = needed_for(batch);
  // A forced transport does not apply to sets of one rank, which only the self backend serves. NCCL
  // is a choice for GPUs only.
  const bool choice_counts =
      forced_backend_ && spec.ranks.size() > 1 && *forced_backend_ != kDeviceBackend;
  Backend* const best = best_backend(spec, collective, choice_counts ? &*forced_backend_ : nullptr);
  if (best == nullptr) {
    throw Error(text(
        "no backend can run ", collective.kind, " of ", collective.dtype, " on ", spec.device.type,
        (choice_counts ? "; HVD_BACKEND allows only '" + *forced_backend_ + "'" : "")));
  }
  return *best;
}

}  // namespace

std::unique_ptr<QueueFactory> make_queue_factory(QueueParts parts,
                                                 std::vector<std::shared_ptr<Backend>> backends,
                                                 std::optional<std::string> forced_backend) {
  return std::make_unique<BackendQueues>(std::move(parts), std::move(backends),
                                         std::move(forced_backend));
}

}  // namespace hvd::runtime
