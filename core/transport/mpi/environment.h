#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/process_watch.h"

/// The process-wide state of MPI, which the standard makes global: initialised once, finalised
/// once, never restarted. All functions are thread-safe except ensure_initialized(), which changes
/// the environment and must run before other threads start.
namespace hvd::mpi {

/// Initialises MPI with MPI_THREAD_MULTIPLE unless the program has done so. hvd then finalises MPI
/// at process exit, and not in shutdown(), because init() may follow and MPI cannot start twice. A
/// program that has called MPI_Init must call MPI_Finalize itself.
///
/// Before it starts MPI itself it sets, unless the user has:
/// OMPI_MCA_btl_vader_single_copy_mechanism=none (a kernel copy per message is slower than two
/// copies through the cache) and OMPI_MCA_mpi_yield_when_idle=1 (waiting must not take the core
/// from the computation).
/// @throws UsageError when MPI has already been finalised
void ensure_initialized();

/// Whether MPI is initialised and not finalised, and may therefore be called.
bool is_active() noexcept;
bool initialized_by_hvd() noexcept;
/// Whether MPI provides MPI_THREAD_MULTIPLE. False before ensure_initialized().
bool threads_multiple() noexcept;
/// "MPI_THREAD_FUNNELED".
std::string_view thread_level_name() noexcept;
/// First line of MPI_Get_library_version. Usable before ensure_initialized().
std::string library_version();

/// Records the loss of a peer. hvd then does not call MPI_Finalize, which would wait for that peer
/// without a limit.
void mark_failed() noexcept;
bool has_failed() noexcept;

/// Records the processes of the other ranks on this host, as of the latest job. hvd then limits its
/// call of MPI_Finalize; see Note [MPI_Finalize].
void set_neighbours(std::vector<ProcessIdentity>);

/// Mark the span between joining and leaving a job. A process that exits inside it skips
/// MPI_Finalize, which would wait for peers that wait for this process. The peers detect its end.
void world_opened() noexcept;
void world_closed() noexcept;

}  // namespace hvd::mpi
