#include "bootstrap/agreement.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

std::string backend_of(const RankStatement& statement) {
  return statement.backend[0] != '\0' ? statement.backend : "unset";
}
std::string cache_capacity_of(const RankStatement& statement) {
  return text(statement.cache_capacity);
}
std::string control_radix_of(const RankStatement& statement) {
  return text(statement.control_radix);
}

struct Setting {
  const char* name;
  std::string (*value_of)(const RankStatement&);
};
constexpr Setting kSettings[] = {{"HVD_BACKEND", backend_of},
                                 {"HVD_CACHE_CAPACITY", cache_capacity_of},
                                 {"HVD_CONTROL_RADIX", control_radix_of}};

void require_same_settings(std::span<const RankStatement> statements, const Topology& topology) {
  for (const Setting& setting : kSettings) {
    const std::string expected = setting.value_of(statements[0]);
    for (std::size_t rank = 1; rank < statements.size(); ++rank) {
      const std::string found = setting.value_of(statements[rank]);
      if (found == expected) continue;
      throw UsageError(text("hvd::init: ", setting.name, " must be the same on every rank: it is ",
                            expected, " on rank 0 (", topology.host_name(0), ") and ", found,
                            " on rank ", rank, " (", topology.host_name(static_cast<int>(rank)),
                            "); set it for all, for instance with 'hvdrun -x ", setting.name,
                            "=VALUE'"));
    }
  }
}

bool may_share_gpu(const RankStatement& a, const RankStatement& b) {
  if (a.may_share != 0 && b.may_share != 0) return true;
  return a.nccl_host != 0 && b.nccl_host != 0 && a.nccl_host != b.nccl_host;
}

/// The reason why NCCL cannot be used; empty if it can.
std::string obstacle_to_nccl(std::span<const RankStatement> statements, const Topology& topology) {
  std::map<std::pair<int, std::string>, std::vector<std::size_t>> owners;  // by host and GPU
  for (std::size_t rank = 0; rank < statements.size(); ++rank) {
    const RankStatement& own = statements[rank];
    if (own.gpu_bus_id[0] == '\0') return text("rank ", rank, " has no GPU");
    if (own.nccl_version == 0) return text("rank ", rank, " has no NCCL that it can use");
    if (own.nccl_version != statements[0].nccl_version) {
      return text("rank ", rank, " has NCCL ", own.nccl_version, ", rank 0 ",
                  statements[0].nccl_version);
    }
    const std::string gpu(own.gpu_bus_id, strnlen(own.gpu_bus_id, sizeof own.gpu_bus_id));
    std::vector<std::size_t>& earlier = owners[{topology.host_of_rank[rank], gpu}];
    for (const std::size_t other : earlier) {
      if (may_share_gpu(statements[other], own)) continue;
      return text("ranks ", other, " and ", rank, " share the GPU ", gpu, " of ",
                  topology.host_name(static_cast<int>(rank)));
    }
    earlier.push_back(rank);
  }
  return {};
}

}  // namespace

RankStatement statement_of(const RuntimeOptions& options) {
  RankStatement statement;
  if (options.backend) options.backend->copy(statement.backend, sizeof statement.backend - 1);
  statement.cache_capacity = static_cast<std::int64_t>(options.cache_capacity);
  statement.control_radix = options.control_radix;
  return statement;
}

void record_failure(RankStatement& statement, const std::exception& error) {
  std::string_view(error.what()).copy(statement.failure, sizeof statement.failure - 1);
}

void require_agreement(std::span<const RankStatement> statements, const Topology& topology) {
  for (std::size_t rank = 0; rank < statements.size(); ++rank) {
    if (statements[rank].failure[0] == '\0') continue;
    throw UsageError(text("hvd::init: rank ", rank, " (",
                          topology.host_name(static_cast<int>(rank)),
                          ") could not begin: ", statements[rank].failure));
  }
  require_same_settings(statements, topology);
}

Agreement compare(std::span<const RankStatement> statements, const Topology& topology) {
  require_agreement(statements, topology);
  Agreement agreement;
  agreement.reason = obstacle_to_nccl(statements, topology);
  agreement.nccl = agreement.reason.empty();
  agreement.gpus_unused = !agreement.nccl && std::any_of(statements.begin(), statements.end(),
                                                         [](const RankStatement& statement) {
                                                           return statement.gpu_bus_id[0] != '\0';
                                                         });
  return agreement;
}

}  // namespace hvd::runtime
