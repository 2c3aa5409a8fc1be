#pragma once

/// Jobs whose set of processes is replaced while they run, for framework adapters. Needs no
/// LibTorch.

#include <cstdint>
#include <string>
#include <vector>

#include "hvd/options.h"

namespace hvd {

/// @addtogroup start
/// @{

/// The address at which other processes reach this one in their next reconfigure(). A text of at
/// most 3,000 bytes, without control characters. If handles are sorted as texts, the processes of
/// each host are next to each other. Each call of reconfigure() that finds no error in its
/// arguments uses up the handle, even if the call fails later: the next call of this function
/// returns another one. Thread-safe.
/// @throws hvd::Error when the process cannot listen at a port
std::string reconfigure_handle();

/// Forms a job of exactly the processes that the handles belong to; it becomes the job of this
/// process. A handle's position in the list is the rank of its process. All these processes must
/// make the call, with equal arguments.
///
/// Until all of them have arrived, the former job of this process continues, and it remains the job
/// of this process if they do not arrive. Once they have arrived, the former job ends on all its
/// ranks: its operations throw ShutdownError, and its process sets become invalid. If the call
/// fails after that, this process is in no job. Processes whose handles are missing are left out,
/// whether they run or not. Memory of operations that were cut off is kept until each process of
/// former jobs on this host has either arrived here or ended. After a job over MPI that did not end
/// in order, it is kept until this process ends.
///
/// Objects of hvd::torch (optimizers, SyncBatchNorm, loaders, checkpointers, Trainer) belong to the
/// job in which they were made and do not follow the call: destroy them before it and make new ones
/// after it. The names of their operations contain numbers that each process counts, so these
/// objects work in a job only if all its members have made the same number of them. Programs that
/// let processes join must use collectives, or DistributedDataParallel over C10dBackend.
///
/// This process keeps the GPU of its former job. In its first job, LOCAL_RANK selects the GPU if it
/// is set, otherwise the local rank. A program that continues after a loss calls wait_on_host() for
/// operations on a GPU before it uses their results, because a loss may cut them off; hvd's
/// optimizers do so once has_reconfigured().
///
/// Messages use UCX, so hvd must be built with UCX, unless there is only one handle.
/// @param uuid a number that this process has not used in an earlier call
/// @param handles the current reconfigure_handle() of each process, including this one
/// @param options those of init(), without `init_method`, `rank` and `world_size`. `init_timeout`
/// limits the time until all have arrived; the rest takes 30 s more at most.
/// @throws UsageError when an argument is wrong, in a worker of an elastic job, in a job over MPI,
/// and where init() does; PeerLostError when a process has ended or does not arrive in time; its
/// rank() is the position of that process if it is known. If the process of rank 0 is running but
/// has given up this call, or has used up its handle in another call, rank() is -1 on the host of
/// rank 0; on other hosts rank() is 0, because they cannot distinguish this from a loss.
void reconfigure(std::int64_t uuid, const std::vector<std::string>& handles,
                 const Options& options = {});

/// Whether a reconfigure() of this process has succeeded. hvd's optimizers then wait for gradients
/// on the host, as in elastic jobs. Thread-safe.
bool has_reconfigured() noexcept;

/// @}

}  // namespace hvd
