#pragma once

#include <string>
#include <string_view>

/// The process-wide state of MPI, which the standard makes global: initialised once, finalized
/// once, never restarted. All functions are thread-safe but ensure_initialized(), which also
/// changes the environment and so belongs before other threads start.
namespace hvd::mpi {

/// Initialises MPI with MPI_THREAD_MULTIPLE unless the program has done so. Then it is finalized at
/// process exit (and not by shutdown(): MPI cannot start twice, but init() may). A program that
/// called MPI_Init calls MPI_Finalize too; hvd never does it then.
///
/// Before it starts MPI itself it sets, unless the user has:
/// OMPI_MCA_btl_vader_single_copy_mechanism=none (a kernel copy per message is slower than two
/// copies through the cache) and OMPI_MCA_mpi_yield_when_idle=1 (waiting must not take the core
/// from the computation).
/// @throws UsageError when MPI has already been finalized.
void ensure_initialized();

/// MPI calls are possible: initialised and not finalized.
bool is_active() noexcept;
bool initialized_by_hvd() noexcept;
/// MPI provides MPI_THREAD_MULTIPLE. False before ensure_initialized().
bool threads_multiple() noexcept;
/// "MPI_THREAD_FUNNELED".
std::string_view thread_level_name() noexcept;
/// What MPI_Get_library_version says, first line. Usable before ensure_initialized().
std::string library_version();

/// MPI says that it takes pointers to GPU memory. Usable before ensure_initialized().
bool cuda_aware() noexcept;

/// After the loss of a peer MPI_Finalize would wait for it forever: from now on hvd does not call
/// it.
void mark_failed() noexcept;
bool has_failed() noexcept;

/// A job that is joined and not left yet. A process that exits meanwhile leaves without
/// MPI_Finalize, which would wait for peers that wait for this process; instead they see its end.
void world_opened() noexcept;
void world_closed() noexcept;

}  // namespace hvd::mpi
