#include "bootstrap/gpu_agreement.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

namespace hvd::runtime {
namespace {

/// Empty: nothing does.
std::string what_keeps_nccl_away(std::span<const GpuReport> reports, const Topology& topology) {
  std::map<std::pair<int, std::string>, int> owners;  // by host and GPU
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const GpuReport& report = reports[rank];
    const std::string who = "rank " + std::to_string(rank);
    if (report.bus_id[0] == '\0') return who + " has no GPU";
    if (report.nccl_version == 0) return who + " has no NCCL that it can use";
    if (report.nccl_version != reports[0].nccl_version) {
      return who + " has NCCL " + std::to_string(report.nccl_version) + ", rank 0 " +
             std::to_string(reports[0].nccl_version);
    }
    const std::string gpu(report.bus_id, strnlen(report.bus_id, sizeof report.bus_id));
    const auto [owner, first] =
        owners.try_emplace({topology.host_of_rank[rank], gpu}, static_cast<int>(rank));
    if (first ||
        (report.may_share != 0 && reports[static_cast<std::size_t>(owner->second)].may_share != 0))
      continue;
    return "ranks " + std::to_string(owner->second) + " and " + std::to_string(rank) +
           " share the GPU " + gpu + " of " + topology.host_name(static_cast<int>(rank));
  }
  return {};
}

}  // namespace

GpuAgreement agree_on_gpus(std::span<const GpuReport> reports, const Topology& topology) {
  GpuAgreement agreement;
  agreement.reason = what_keeps_nccl_away(reports, topology);
  agreement.nccl = agreement.reason.empty();
  agreement.cuda_aware_mpi =
      std::all_of(reports.begin(), reports.end(),
                  [](const GpuReport& report) { return report.cuda_aware != 0; });
  return agreement;
}

}  // namespace hvd::runtime
