#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "hvd/topology.h"

namespace hvd::runtime {

/// What a rank tells the others of its GPU when the job begins. Plain bytes, for the wire.
struct GpuReport {
  char bus_id[32] = {};           ///< tells the GPUs of a host apart; empty: this rank has none
  std::int32_t nccl_version = 0;  ///< 23203 is 2.32.3; 0: none that can be used
  std::int32_t may_share = 0;     ///< NCCL has been told to work with several ranks on one GPU
  std::int32_t cuda_aware = 0;    ///< MPI takes pointers to GPU memory, and may be handed them
};

/// What follows from all of them, the same on every rank.
struct GpuAgreement {
  bool nccl = false;
  std::string reason = {};      ///< why not
  bool cuda_aware_mpi = false;  ///< every rank's MPI is, whether it has a GPU or not
};

/// NCCL works between ranks that all have a GPU of their own and the same version of it. Several
/// ranks on one GPU are refused by NCCL before 2.30, and later unless NCCL_MULTI_RANK_GPU_ENABLE=1;
/// with a NCCL_HOSTID of its own each rank looks like a host to it.
GpuAgreement agree_on_gpus(std::span<const GpuReport>, const Topology&);

}  // namespace hvd::runtime
