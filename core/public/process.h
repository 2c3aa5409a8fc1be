#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/process_watch.h"
#include "base/shared_arena.h"
#include "bootstrap/join.h"
#include "engine/runtime.h"
#include "engine/runtime_options.h"

/// The state that the parts of core/public share: the runtime of this process.
namespace hvd::runtime {

std::shared_ptr<Runtime> runtime_or_null();
/// @throws NotInitializedError without one; UsageError in a worker of an elastic job before run()
std::shared_ptr<Runtime> current_runtime();
/// Null if this process has no arena, or has inherited it.
std::shared_ptr<SharedArena> process_arena();

/// The arguments of init() in a worker of an elastic job, which joins in run(). Empty in other
/// processes, and before init() and after shutdown().
std::optional<RuntimeOptions> elastic_options();
/// Whether a thread is in hvd::elastic::run(). The process then leaves no generation at its exit:
/// its agent reports its end.
void set_in_elastic_run(bool) noexcept;

/// Makes the runtime of a job that this process has joined. @pre the process has no runtime
std::shared_ptr<Runtime> adopt(const RuntimeOptions&, JobConnection);
/// Leaves the job, as shutdown() does, and returns when all ranks have left or it has failed.
void leave_generation();

/// Processes and memory of former jobs of this process that a new job must take into account.
struct FormerPeers {
  std::vector<ProcessIdentity> processes = {};  ///< the other ones of this host
  bool memory_lost = false;  ///< memory of operations that were cut off can never be released
  std::string device_failure =
      {};  ///< why this process's GPU does not work any more; empty: it does
};
/// Joins a job. The function calls its argument `leave` once all ranks of the new job have arrived;
/// `leave` ends the former job of this process, if it is in one, on all ranks, and leaves it.
using JoinOther =
    std::function<JobConnection(const RuntimeOptions&, const std::function<FormerPeers()>& leave)>;
/// Replaces the job of this process by the job that `join` joins, for hvd::reconfigure(). The
/// process stays in its job if `join` throws before it calls `leave`.
/// @throws UsageError in a worker of an elastic job, in a job over MPI, and in a child of a process
/// that is in a job
void replace_job(const Options&, const JoinOther& join);

}  // namespace hvd::runtime
