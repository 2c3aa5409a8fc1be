#include "backend/nccl/nccl_backend.h"

#include <utility>

#include "backend/nccl/nccl_channel.h"
#include "kernels/floating.h"

namespace hvd {
namespace {

/// Above every backend for the host's memory, which a GPU's tensors have to be copied to.
constexpr int kScore = 30;

}  // namespace

NcclBackend::NcclBackend(std::shared_ptr<nccl::Library> library,
                         std::shared_ptr<device::Context> device,
                         nccl::OpenHostChannel open_host_channel, const nccl::NcclOptions& options,
                         const Clock& clock)
    : library_(std::move(library)),
      device_(std::move(device)),
      open_host_channel_(std::move(open_host_channel)),
      options_(options),
      clock_(clock),
      teardown_(std::make_shared<nccl::CommTeardown>(library_, device_, options.teardown_timeout)) {
}

const Clock& NcclBackend::steady_clock() {
  static const SteadyClock clock;
  return clock;
}

int NcclBackend::score(const Topology&, const ChannelSpec& spec,
                       const Collective& collective) const noexcept {
  if (spec.device.type != DeviceType::kCuda || collective.op == ReduceOp::kAdasum) return 0;
  switch (collective.kind) {
    case OpKind::kBroadcast:
    case OpKind::kAllgather:
    case OpKind::kAlltoall:
      return kScore;
    case OpKind::kAllreduce:
    case OpKind::kReducescatter:
      // The host computes averages of integers exactly, NCCL would let their sum overflow first.
      if (collective.dtype == DataType::kInt16) return 0;
      // NCCL has no bitwise operations. The host's memory takes them, except for those that are a
      // minimum or maximum of bools.
      if (is_bitwise(collective.op) &&
          (collective.dtype != DataType::kBool || collective.op == ReduceOp::kBitXor))
        return 0;
      return is_floating(collective.dtype) || collective.scale.identity() ? kScore : 0;
    default:
      return 0;
  }
}

// Note [One stream for all communicators]: a kernel of NCCL occupies its part of the GPU until all
// ranks of its communicator run theirs. Two communicators in two streams may find room for the one
// first on one rank, and for the other first on another, and then wait for each other forever,
// although both ranks' hosts have launched them in the same order. In one stream the device keeps
// to the order of the host, which is the plan's, and so the same on all ranks. NCCL has a setting
// for that as well (NCCL_LAUNCH_ORDER_IMPLICIT), from 2.26 on.
std::unique_ptr<Channel> NcclBackend::open(const ChannelSpec& spec, Peers& peers) {
  ChannelSpec host = spec;
  host.device = {};
  host.instance = 1;
  if (!stream_) stream_ = std::make_shared<device::OwnedStream>(*device_);
  return std::make_unique<nccl::NcclChannel>(library_, device_, stream_, teardown_, spec,
                                             open_host_channel_(host, peers), options_, clock_);
}

}  // namespace hvd
