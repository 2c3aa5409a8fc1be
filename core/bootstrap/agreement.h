#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <type_traits>

#include "base/topology.h"
#include "engine/runtime_options.h"

namespace hvd::runtime {

/// Sent by each rank to all others when the job begins: its settings that must be the same on all
/// ranks, its GPU, or the reason why it cannot begin. Plain bytes, because all ranks run the same
/// build.
struct RankStatement {
  char failure[512] = {};  ///< why the rank cannot begin; empty: it can
  char backend[32] = {};   ///< HVD_BACKEND; empty: unset
  std::int64_t cache_capacity = 0;
  std::int64_t control_radix = 0;

  char gpu_bus_id[32] = {};       ///< identifies a GPU of a host; empty: no GPU
  std::int32_t nccl_version = 0;  ///< 23203 is 2.32.3; 0: no usable NCCL
  std::int32_t may_share = 0;     ///< NCCL_MULTI_RANK_GPU_ENABLE=1, and NCCL supports it
  std::uint64_t nccl_host = 0;    ///< hash of NCCL_HOSTID; 0: unset
};
static_assert(std::has_unique_object_representations_v<RankStatement>, "no padding is sent");

/// A statement with this rank's settings, and without a GPU.
RankStatement statement_of(const RuntimeOptions&);

/// The conclusion from all statements, the same on every rank.
struct Agreement {
  bool nccl = false;
  std::string reason = {};   ///< why NCCL is not used
  bool gpus_unused = false;  ///< a rank has a GPU, and NCCL is not used
};

/// Records why this rank cannot begin.
void record_failure(RankStatement&, const std::exception&);

/// Compares the settings of all ranks.
/// @param statements by rank
/// @throws UsageError when a rank cannot begin, or when its settings differ from those of rank 0
void require_agreement(std::span<const RankStatement> statements, const Topology&);

/// Compares the statements of all ranks, and decides whether the job uses NCCL. Every rank must
/// have its own GPU, and all must have the same version of NCCL. Versions before 2.30 refuse
/// several ranks on one GPU, and later ones do so unless NCCL_MULTI_RANK_GPU_ENABLE=1. NCCL treats
/// ranks with different values of NCCL_HOSTID as ranks of different hosts, so they may share a GPU.
/// @throws as require_agreement()
Agreement compare(std::span<const RankStatement> statements, const Topology&);

}  // namespace hvd::runtime
