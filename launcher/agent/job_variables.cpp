#include "agent/job_variables.h"

#include <algorithm>
#include <optional>

#include "base/text.h"
#include "command/rank_environment.h"
#include "system/process.h"

namespace hvd::launcher {

void add_job_variables(std::vector<std::string>& environment, const StartOrder& order,
                       const std::string& init_method, std::string_view token,
                       const std::vector<std::string>& kept) {
  const auto set = [&](const std::string& name, const std::optional<std::string>& value) {
    if (std::find(kept.begin(), kept.end(), name) == kept.end())
      set_variable(environment, name, value);
  };
  set("GROUP_RANK", text(order.node));
  set("GROUP_WORLD_SIZE", text(order.nodes));
  set("HOROVOD_CROSS_RANK", text(order.cross_rank));
  set("HOROVOD_CROSS_SIZE", text(order.cross_size));
  if (order.master_port > 0) {
    set("MASTER_ADDR", order.address);
    set("MASTER_PORT", text(order.master_port));
  }
  set(kPeerVariable, order.peer.empty() ? std::nullopt : std::optional(order.peer));
  // hvdrun may itself be a child of a rank or of mpirun, whose variables do not apply to this job.
  if (init_method.empty()) {
    for (const char* name : {"HVD_INIT_METHOD", "HVD_JOB_NAME", "HVD_JOB_TOKEN"})
      set(name, std::nullopt);
    return;
  }
  set("HVD_INIT_METHOD", init_method);
  set("HVD_JOB_NAME", job_name(token));
  set("HVD_JOB_TOKEN", job_token(token));
  for (const std::string_view prefix : {"OMPI_COMM_WORLD_", "PMIX_", "PMI_"}) {
    std::erase_if(environment,
                  [&](const std::string& variable) { return variable.starts_with(prefix); });
  }
}

}  // namespace hvd::launcher
