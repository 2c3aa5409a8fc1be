#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reports/report.h"

namespace hvd::launcher {

/// The environment of a worker of an elastic job, which has no rank when it starts.
struct WorkerSettings {
  int local_rank = 0;   ///< its slot on the host
  int omp_threads = 0;  ///< 0: OMP_NUM_THREADS stays as it is
  int member_socket = -1;
};

/// @param environment of the agent
/// @param token hvdrun's own, which the program must not see; the job's is derived from it
/// @param kept variables that -x has set: they stay as they are
std::vector<std::string> worker_environment(std::vector<std::string> environment,
                                            const WorkerSettings& settings, const StartOrder& order,
                                            std::string_view token,
                                            const std::vector<std::string>& kept);

}  // namespace hvd::launcher
