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
/// sets are not valid any more. If the call fails after that, this process is in no job. Processes
/// whose handles are missing are left out, whether they run or not. Memory of operations that have
/// been cut off is kept until each process of former jobs on this host has either arrived here or
/// ended, and for good after a job over MPI that did not end in order.
///
/// Objects of hvd::torch (optimizers, SyncBatchNorm, loaders, checkpointers, Trainer) belong to the
/// job in which they were made and do not follow the call: destroy them before it and make them
/// anew after it. Their operations have numbers in their names that each process counts, so they
/// serve a job only if all its members have made equally many of them. Programs that let processes
/// join use collectives, or DistributedDataParallel over C10dBackend.
///
/// The GPU stays that of the former job. In the first one it is that of LOCAL_RANK, if that is set,
/// or of the local rank. A program that goes on after a loss calls wait_on_host() for operations on
/// a GPU before it uses their results, because a loss may cut them off; hvd's optimizers do so once
/// has_reconfigured().
///
/// The messages go over UCX, so hvd has to be built with it, unless there is one handle.
/// @param uuid a number that this process has not used in an earlier call
/// @param handles what reconfigure_handle() returns on each process now, this one included
/// @param options those of init(), without `init_method`, `rank` and `world_size`. `init_timeout`
/// limits the time until all have arrived; the rest takes 30 s more at most.
/// @throws UsageError when an argument is wrong, in a worker of an elastic job, in a job over MPI,
/// and where init() does; PeerLostError when a process has ended or does not arrive in time, whose
/// rank() is its position if it is known. If the process of rank 0 runs and has ended the call, or
/// had made another one with its handle, rank() is -1 on its host. On other hosts that looks like a
/// loss of rank 0.
void reconfigure(std::int64_t uuid, const std::vector<std::string>& handles,
                 const Options& options = {});

/// Whether a reconfigure() of this process has succeeded. hvd's optimizers then wait for gradients
/// on the host, as in elastic jobs. Thread-safe.
bool has_reconfigured() noexcept;

/// @}

}  // namespace hvd
