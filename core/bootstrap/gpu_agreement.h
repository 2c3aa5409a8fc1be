#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/topology.h"

namespace hvd::runtime {

/// Sent by each rank to all others when the job begins: its GPU. Plain bytes, for the wire.
struct GpuReport {
  char bus_id[32] = {};           ///< identifies a GPU of a host; empty: this rank has none
  std::int32_t nccl_version = 0;  ///< 23203 is 2.32.3; 0: no usable NCCL
  std::int32_t may_share = 0;     ///< NCCL_MULTI_RANK_GPU_ENABLE=1, and NCCL supports it
  std::uint64_t nccl_host = 0;    ///< hash of NCCL_HOSTID; 0: unset
};

/// The conclusion from all reports, the same on every rank.
struct GpuAgreement {
  bool nccl = false;
  std::string reason = {};   ///< why NCCL is not used
  bool gpus_unused = false;  ///< a rank has a GPU, and NCCL is not used
};

/// Decides whether the job uses NCCL. It needs a GPU of its own and the same NCCL version on every
/// rank. NCCL refuses several ranks on one GPU before 2.30, and later unless
/// NCCL_MULTI_RANK_GPU_ENABLE=1. Ranks with different values of NCCL_HOSTID are on different hosts
/// to NCCL and may share a GPU.
GpuAgreement agree_on_gpus(std::span<const GpuReport>, const Topology&);

}  // namespace hvd::runtime
