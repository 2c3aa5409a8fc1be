#include "agent/worker_environment.h"

#include <optional>
#include <utility>

#include "agent/job_variables.h"
#include "base/text.h"
#include "command/rank_environment.h"
#include "system/process.h"

namespace hvd::launcher {

std::vector<std::string> worker_environment(std::vector<std::string> environment,
                                            const WorkerSettings& settings, const StartOrder& order,
                                            std::string_view token,
                                            const std::vector<std::string>& kept) {
  environment = rank_environment(std::move(environment), {.local_rank = settings.local_rank},
                                 settings.omp_threads);
  // Nodes that join at an endpoint derive the same token each time their command line is started.
  add_job_variables(environment, order, "hvdrun", text(token, order.job), kept);
  // These values change while the worker runs.
  for (const char* const name :
       {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE",
        "GROUP_WORLD_SIZE", "HVD_RANK", "HVD_SIZE", "HVD_LOCAL_RANK", "HVD_LOCAL_SIZE",
        "HVD_INIT_METHOD", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "MASTER_ADDR",
        "MASTER_PORT"})
    set_variable(environment, name, std::nullopt);
  set_variable(environment, "TORCHELASTIC_RESTART_COUNT", text(order.restarts));
  set_variable(environment, "HVD_JOB_ID", order.job);
  set_variable(environment, "HVD_WORKER_ID", text(order.worker));
  set_variable(environment, "HVD_MEMBER_SOCKET", text(settings.member_socket));
  return environment;
}

}  // namespace hvd::launcher
