// The executor's part for tensors on a GPU.
#include <string>
#include <utility>

#include "backend/staged/host_staged_channel.h"
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
ChannelQueue& Executor::device_queue_for(const BatchExecution& execution) {
  if (!environment_.device) throw Error("a plan names a tensor on a GPU, and this rank has none");
  ChannelSpec spec = execution.spec();
  spec.device.index = environment_.device->device();
  Backend* own = nullptr;
  for (const auto& backend : backends_) {
    if (forced_backend_ && backend->name() != *forced_backend_) continue;
    if (backend->score(environment_.topology, spec, execution.collective()) > 0)
      own = backend.get();
  }
  ChannelSpec host = spec;
  host.device = {};
  host.instance = kStagingInstance;
  Collective collective = execution.collective();
  if (collective.op == ReduceOp::kAdasum) {  // it is made of what backends have that can exchange
    collective.op = ReduceOp::kSum;
    collective.kind = OpKind::kAlltoall;
  }
  Backend& backend = own != nullptr ? *own : choose_backend(host, collective);
  const bool carries = own == nullptr && backend.carries_memory_of(spec.device.type);
  const std::string name = std::string(backend.name()) + (own != nullptr ? ""
                                                          : carries      ? ", CUDA-aware"
                                                                         : ", staged");
  ChannelQueue& queue = queues_[{spec.process_set, name}];
  if (queue.channel) return queue;
  queue.backend = name;
  queue.ordered = own != nullptr;
  if (own != nullptr) {
    queue.channel = backend.open(spec, environment_.peers);
  } else {
    ChannelSpec carried = spec;
    carried.instance = kCarrierInstance;
    std::unique_ptr<Channel> carrier =
        carries ? backend.open(carried, environment_.peers) : nullptr;
    queue.channel =
        staged::make_host_staged_channel(backend.open(host, environment_.peers), std::move(carrier),
                                         environment_.device, spec, environment_.arena);
  }
  queue.device =
      std::make_unique<DevicePipeline>(*environment_.device, *queue.channel, own != nullptr);
  carries_device_memory_ = carries_device_memory_ || carries;
  return queue;
}

device::Context* Executor::device_to_be_current() noexcept {
  device_is_current_ = carries_device_memory_;
  return device_is_current_ ? environment_.device.get() : nullptr;
}

bool Executor::device_may_launch(ChannelQueue& queue, const BatchExecution& execution) {
  if (queue.ordered && execution.device_order != device_completed_) return false;
  if (carries_device_memory_ && !device_is_current_) return false;  // from the next round on it is
  return queue.channel->ready();
}

std::unique_ptr<Work> Executor::launch_on_device(ChannelQueue& queue, BatchExecution& execution) {
  if (execution.nothing_to_move()) {
    if (!execution.absent_here()) execution.ask_for_outputs();
    return nullptr;
  }
  const composite::Launch launch = [this, &queue](const Collective& collective,
                                                  std::span<const std::byte> in,
                                                  std::span<std::byte> out) {
    environment_.counters.backend_calls.fetch_add(1, std::memory_order_relaxed);
    return queue.channel->launch(collective, in, out);
  };
  const composite::Launch launch_on_host = [&queue](const Collective& collective,
                                                    std::span<const std::byte> in,
                                                    std::span<std::byte> out) {
    Channel* const host = queue.channel->host();
    return (host != nullptr ? host : queue.channel.get())->launch(collective, in, out);
  };
  return start_on_device(*queue.device, execution, launch, launch_on_host);
}

}  // namespace hvd::runtime
