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
  /// Limit for creating a communicator; after it a peer counts as lost.
  Duration init_timeout = std::chrono::minutes(5);
  /// Limit of the wait for the peers when a communicator ends cleanly.
  Duration finalize_timeout = std::chrono::seconds(5);
  /// Limit for NCCL to free communicators; after it the device is given up.
  Duration teardown_timeout = std::chrono::seconds(10);
  /// Size in bytes of each of the two fusion buffers that NCCL allocates and that are registered
  /// with the communicator; 0: no such buffers. If the ranks' values differ, no rank has such
  /// buffers.
  std::size_t registered_bytes = 0;
};

/// Opens a channel for host memory between the ranks of a device's channel.
using OpenHostChannel = std::function<std::unique_ptr<Channel>(const ChannelSpec&, Peers&)>;

}  // namespace nccl

/// Collectives on GPU memory with NCCL, with one communicator per process set. NCCL chooses the
/// order of additions and rounds fp16 and bf16 at each of them (decision 14). Other backends run
/// Adasum, and reductions of int16 and of integers with factors.
///
/// All communicators of a device queue their kernels in one stream, see Note [One stream for all
/// communicators]. Thread-safety is that of hvd::Backend.
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
  const std::shared_ptr<nccl::CommTeardown> teardown_;  // shared by all communicators of the device
  std::shared_ptr<const device::OwnedStream> stream_;   // created with the first channel
};

}  // namespace hvd
