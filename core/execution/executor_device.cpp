// The executor's part for tensors on a GPU.
#include <string>
#include <utility>

#include "backend/staged/staged_channel.h"
#include "execution/executor.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

/// Of the channel for the host's memory that a staged one has to itself, and of the one beside it
/// that carries the device's memory.
constexpr int kStagingInstance = 2;
constexpr int kCarrierInstance = 3;
static_assert(kCarrierInstance < kMostInstances);

}  // namespace

// The best backend that has GPUs; where none can do this, a channel through the host's memory. All
// of it follows from what the ranks have agreed on, so they open the same channels at the same
// point of the plan.
Executor::Lane& Executor::device_lane_for(const Job& job) {
  if (!environment_.device) throw Error("a plan names a tensor on a GPU, and this rank has none");
  ChannelSpec spec = job.spec();
  spec.device.index = environment_.device->device();
  Backend* own = nullptr;
  for (const auto& backend : backends_) {
    if (forced_backend_ && backend->name() != *forced_backend_) continue;
    if (backend->score(environment_.topology, spec, job.collective()) > 0) own = backend.get();
  }
  ChannelSpec host = spec;
  host.device = {};
  host.instance = kStagingInstance;
  Collective collective = job.collective();
  if (collective.op == ReduceOp::kAdasum) {  // it is made of what backends have that can exchange
    collective.op = ReduceOp::kSum;
    collective.kind = OpKind::kAlltoall;
  }
  Backend& backend = own != nullptr ? *own : choose_backend(host, collective);
  const bool carries = own == nullptr && backend.carries_memory_of(spec.device.type);
  const std::string name = std::string(backend.name()) + (own != nullptr ? ""
                                                          : carries      ? ", CUDA-aware"
                                                                         : ", staged");
  Lane& lane = lanes_[{spec.process_set, name}];
  if (lane.channel) return lane;
  lane.backend = name;
  lane.ordered = own != nullptr;
  if (own != nullptr) {
    lane.channel = backend.open(spec, environment_.peers);
  } else {
    ChannelSpec carried = spec;
    carried.instance = kCarrierInstance;
    std::unique_ptr<Channel> carrier =
        carries ? backend.open(carried, environment_.peers) : nullptr;
    lane.channel =
        staged::make_staged_channel(backend.open(host, environment_.peers), std::move(carrier),
                                    environment_.device, spec, environment_.arena);
  }
  lane.device = std::make_unique<DeviceLane>(*environment_.device, *lane.channel, own != nullptr);
  carries_device_memory_ = carries_device_memory_ || carries;
  return lane;
}

device::Context* Executor::device_to_be_current() noexcept {
  device_is_current_ = carries_device_memory_;
  return device_is_current_ ? environment_.device.get() : nullptr;
}

bool Executor::device_may_launch(Lane& lane, const Job& job) {
  if (lane.ordered && job.device_order != device_completed_) return false;
  if (carries_device_memory_ && !device_is_current_) return false;  // from the next round on it is
  return lane.channel->ready();
}

std::unique_ptr<Work> Executor::launch_on_device(Lane& lane, Job& job) {
  if (job.nothing_to_move()) {
    if (!job.absent_here()) job.ask_for_outputs();
    return nullptr;
  }
  const composite::Launch launch = [this, &lane](const Collective& collective,
                                                 std::span<const std::byte> in,
                                                 std::span<std::byte> out) {
    environment_.counters.backend_calls.fetch_add(1, std::memory_order_relaxed);
    return lane.channel->launch(collective, in, out);
  };
  const composite::Launch launch_on_host = [&lane](const Collective& collective,
                                                   std::span<const std::byte> in,
                                                   std::span<std::byte> out) {
    Channel* const host = lane.channel->host();
    return (host != nullptr ? host : lane.channel.get())->launch(collective, in, out);
  };
  return start_on_device(*lane.device, job, launch, launch_on_host);
}

}  // namespace hvd::runtime
