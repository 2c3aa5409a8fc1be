#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "base/topology.h"
#include "bootstrap/agreement.h"
#include "device/context.h"
#include "engine/runtime_options.h"

namespace hvd::nccl {
class Library;
}

namespace hvd::runtime {

/// This rank's GPU, and the NCCL library that it uses if all ranks can.
struct Gpu {
  std::shared_ptr<device::Context> device = {};  ///< null: this rank has no GPU
  std::shared_ptr<nccl::Library> nccl = {};      ///< null: NCCL cannot be used
};

/// Finds this rank's GPU, without using it yet, and writes it into `statement`.
/// @throws UsageError for an HVD_DEVICE that this process does not have
Gpu find_gpu(const RuntimeOptions&, int local_rank, RankStatement& statement);

/// Logs on rank 0 that tensors on GPUs are staged through the host's memory, which is many times
/// slower than NCCL. A warning, unless the program has requested another backend.
void report_unused_gpus(const Agreement&, const RuntimeOptions&);

/// The backend for GPUs; null if the ranks have agreed not to use NCCL, or this one has no GPU.
/// @param host_backends carry the ids of communicators, and the splits of an alltoall
/// @throws UsageError when HVD_BACKEND requests NCCL, and it cannot be used
std::shared_ptr<Backend> make_nccl_backend(
    const Gpu&, const Agreement&, const Topology&,
    const std::vector<std::shared_ptr<Backend>>& host_backends, const RuntimeOptions&);

/// Whether this build has NCCL, NCCL can be loaded, and there is a GPU.
bool nccl_usable() noexcept;

/// See hvd::use_device_memory(). Call it before join_job().
void use_device_memory(DeviceMemory);
/// For tests, before join_job(): replaces CUDA's device with a simulated one; null restores CUDA's.
/// Without a simulated NCCL, only the host's backends serve the device.
void use_device_api(std::shared_ptr<device::Api>);
/// For tests: sets the simulated device's NCCL. Not used in a build without NCCL.
void use_nccl_library(std::shared_ptr<nccl::Library>);

}  // namespace hvd::runtime
