#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "backend/backend.h"
#include "backend/nccl/comm_teardown.h"
#include "backend/nccl/library.h"
#include "base/clock.h"
#include "device/context.h"

namespace hvd {
namespace nccl {

struct NcclOptions {
  /// A communicator that is not there by then is a lost peer.
  Duration init_timeout = std::chrono::minutes(5);
  /// How long the end of a communicator waits for the peers.
  Duration finalize_timeout = std::chrono::seconds(5);
  /// How long NCCL may take to free communicators before the device is given up.
  Duration teardown_timeout = std::chrono::seconds(10);
  /// Bytes of each of the two fusion buffers that come from NCCL and are registered with the
  /// communicator; 0: none. Where the ranks differ, none are.
  std::size_t registered_bytes = 0;
  /// They become symmetric windows as well, if all ranks can and want it. An error while that is
  /// done ends the job.
  bool windows = false;
};

/// Opens a channel for host memory between the ranks of a device's channel.
using OpenHostChannel = std::function<std::unique_ptr<Channel>(const ChannelSpec&, Peers&)>;

}  // namespace nccl

/// Collectives on GPU memory with NCCL: one communicator per process set. A result is what NCCL
/// computes, fp16 and bf16 rounded at every addition, in an order of its own; see
/// docs/decisions/0014-nccl-behind-a-seam.md. Integers that would have to be scaled, int16 and
/// Adasum are left to others.
///
/// All communicators of a device queue their kernels in one stream: see Note [One stream for all
/// communicators].
///
/// Threading: as hvd::Backend says.
class NcclBackend final : public Backend {
 public:
  NcclBackend(std::shared_ptr<nccl::Library>, std::shared_ptr<device::Context>,
              nccl::OpenHostChannel, const nccl::NcclOptions& = {}, const Clock& = steady_clock());

  std::string_view name() const noexcept override { return "nccl"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override;
  std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) override;

 private:
  static const Clock& steady_clock();

  const std::shared_ptr<nccl::Library> library_;
  const std::shared_ptr<device::Context> device_;
  const nccl::OpenHostChannel open_host_channel_;
  const nccl::NcclOptions options_;
  const Clock& clock_;
  const std::shared_ptr<nccl::CommTeardown> teardown_;  // of all communicators of the device
  std::shared_ptr<const device::OwnedStream> stream_;   // made when the first channel is opened
};

}  // namespace hvd
