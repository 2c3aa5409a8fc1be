#pragma once

/// Jobs whose members are named anew while they run, for framework adapters. Needs no LibTorch.

#include <cstdint>
#include <string>
#include <vector>

#include "hvd/options.h"

namespace hvd {

/// @addtogroup start
/// @{

/// The address at which other processes reach this one in their next reconfigure(). A text of at
/// most 3,000 bytes, without control characters. Handles that are sorted as texts have the
/// processes of a host one after the other. Each call of reconfigure() that has found no error in
/// its arguments uses the handle up, also if it fails: the next call of this function returns
/// another one. Thread-safe.
/// @throws hvd::Error when the process cannot listen at a port
std::string reconfigure_handle();

/// Forms a job of exactly the processes behind the handles, and makes it this process's. A handle's
/// position is the rank of its process. All these processes call it, with equal arguments.
///
/// Until all have arrived, a job in which this process is goes on, and stays its job if they do not
/// arrive. Then that job ends on all its ranks: its operations throw ShutdownError, and its process
/// sets are not valid any more. Processes whose handles are missing are left out, whether they run
/// or not. Memory of its operations that have been cut off is kept until each of its processes on
/// this host has either arrived here or ended.
///
/// The messages go over UCX, so hvd has to be built with it, unless there is one handle.
/// @param uuid a number that this process has not used in an earlier call
/// @param handles what reconfigure_handle() returns on each process now, this one included
/// @param options those of init(), without `init_method`, `rank` and `world_size`. `init_timeout`
/// limits the call.
/// @throws UsageError when an argument is wrong, in a worker of an elastic job, in a job over MPI,
/// and where init() does; PeerLostError when a process has ended or does not arrive in time, whose
/// rank() is its position if it is known
void reconfigure(std::int64_t uuid, const std::vector<std::string>& handles,
                 const Options& options = {});

/// @}

}  // namespace hvd
