#pragma once

/// The torch-free public interface of hvd: start and stop, rank and size, barrier, timeline,
/// metrics.
/// `<hvd/torch.h>` adds LibTorch; `<hvd/collectives.h>` is for framework adapters.

#include <cstdint>
#include <string>
#include <string_view>

#include "hvd/error.h"
#include "hvd/options.h"
#include "hvd/process_set.h"
#include "hvd/timeline.h"
#include "hvd/types.h"

namespace hvd {

/// @addtogroup start
/// @{

/// Joins the job this process was launched into: under hvdrun, mpirun, srun or torchrun, as
/// Options::init_method selects, or alone (size 1). Collective over all ranks. May follow a
/// shutdown(). The program may have called MPI_Init itself.
/// @throws UsageError when called twice, when an option or variable is malformed, when two of them
/// contradict each other, or when one of several processes has no method to find the others;
/// PeerLostError when a rank does not arrive within Options::init_timeout.
void init(const Options& = {});

/// Leaves the job. Collective; idempotent. Returns at once when the runtime has failed. Operations
/// still outstanding end with ShutdownError.
void shutdown();

/// Reports that this rank is about to end because of an error. hvdrun shows the cause, and the
/// other ranks' operations end with a PeerLostError that contains it. For errors that a framework
/// or a binding of another language catches; an uncaught C++ exception is reported without a call.
/// Returns when the other ranks are notified, after at most 0.5 s. Afterwards the runtime has
/// failed on this rank. No effect outside a job and when the runtime has failed already.
/// Thread-safe.
/// @param cause a text such as "train.py:12: ValueError: the data set is empty"
void fail(std::string_view cause) noexcept;

/// True between init() and shutdown(), even after the runtime has failed. Thread-safe.
bool is_initialized() noexcept;

/// @name Ranks and sizes
/// Thread-safe. @throws NotInitializedError before init()
/// @{

/// This rank, 0 to size() - 1.
int rank();
/// The number of ranks in the job.
int size();
/// This rank's number among the ranks of its host, 0 to local_size() - 1.
int local_rank();
/// The number of ranks on this host.
int local_size();
/// The number of this host among the hosts that have a rank of this local_rank().
int cross_rank();
/// The number of hosts that have a rank of this local_rank().
int cross_size();
/// Whether every host runs the same number of ranks.
bool is_homogeneous();
/// How the ranks found each other: "mpi://", "hvdrun://", "tcp://HOST:PORT", "file:///path",
/// "local://" (one rank alone).
std::string init_method();
/// The carrier of the job's messages: "mpi", "ucx", or "local" (one rank alone).
std::string controller();

/// @}

/// @name Features of this build
/// These functions may be called before init().
/// @{

bool mpi_built() noexcept;
bool cuda_built() noexcept;
bool nccl_built() noexcept;
bool shm_built() noexcept;
/// MPI runs with MPI_THREAD_MULTIPLE (or is not used by this job).
bool mpi_threads_supported();
/// NCCL is built in and a usable GPU is present.
bool nccl_available() noexcept;
/// One "name: value" line per component: its version, or the reason why it was not
/// built in.
std::string build_info();

/// @}

/// Returns when every rank of the set has called it.
/// @throws PeerLostError, StalledError, ShutdownError.
void barrier(const ProcessSet& = {});

/// Declares that this rank has no more data. Blocks until every rank of the job has called it.
/// Until then this rank takes part in the operations of the others with a neutral contribution
/// (zeros to a sum, no rows to an allgather), and an average divides by the number of ranks that
/// contribute. Operations that are impossible then (a broadcast from this rank, a gather to it,
/// alltoall, changes of process sets) fail with a MismatchError on the ranks that submit them.
/// @return the last rank to join.
/// @throws PeerLostError, StalledError, ShutdownError.
int join();

/// @}

/// @addtogroup observe
/// @{

/// Counters of one rank since init().
struct Metrics {
  std::uint64_t control_messages_sent = 0;
  std::uint64_t control_messages_received = 0;
  std::uint64_t control_bytes_sent = 0;
  /// Operations that were negotiated; of these, those reported as a cache hit instead of a full
  /// request; and operations that ran without negotiation, by schedule replay.
  std::uint64_t negotiated_operations = 0;
  std::uint64_t cached_operations = 0;
  std::uint64_t locked_operations = 0;
  std::uint64_t completed_operations = 0;
  std::uint64_t failed_operations = 0;
  /// Calls of a backend; fewer than the operations if some were fused.
  std::uint64_t backend_calls = 0;
  /// Payload bytes of this rank's inputs.
  std::uint64_t bytes = 0;
  std::uint64_t stalls = 0;
  std::uint64_t plans_applied = 0;

  std::string to_json() const;
  /// Prometheus text exposition format, metrics named hvd_*.
  std::string to_prometheus() const;
};
/// The counters of this rank at this moment. Thread-safe. @throws NotInitializedError
Metrics metrics();

/// @}

}  // namespace hvd
