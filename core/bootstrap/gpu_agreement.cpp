#include "bootstrap/gpu_agreement.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace hvd::runtime {
namespace {

bool may_share_gpu(const GpuReport& a, const GpuReport& b) {
  if (a.may_share != 0 && b.may_share != 0) return true;
  return a.nccl_host != 0 && b.nccl_host != 0 && a.nccl_host != b.nccl_host;
}

/// Why NCCL cannot be used; empty if it can.
std::string what_keeps_nccl_away(std::span<const GpuReport> reports, const Topology& topology) {
  std::map<std::pair<int, std::string>, std::vector<std::size_t>> owners;  // by host and GPU
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
    std::vector<std::size_t>& earlier = owners[{topology.host_of_rank[rank], gpu}];
    for (const std::size_t other : earlier) {
      if (may_share_gpu(reports[other], report)) continue;
      return "ranks " + std::to_string(other) + " and " + std::to_string(rank) + " share the GPU " +
             gpu + " of " + topology.host_name(static_cast<int>(rank));
    }
    earlier.push_back(rank);
  }
  return {};
}

}  // namespace

GpuAgreement agree_on_gpus(std::span<const GpuReport> reports, const Topology& topology) {
  GpuAgreement agreement;
  agreement.reason = what_keeps_nccl_away(reports, topology);
  agreement.nccl = agreement.reason.empty();
  agreement.gpus_unused =
      !agreement.nccl && std::any_of(reports.begin(), reports.end(), [](const GpuReport& report) {
        return report.bus_id[0] != '\0';
      });
  return agreement;
}

}  // namespace hvd::runtime
