#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "bootstrap/world.h"

namespace hvd::runtime {

/// A job over MPI.
class MpiJob : public World {
 public:
  /// Every rank contributes `bytes` bytes and receives the bytes of all ranks, in rank order.
  /// Collective. Not allowed after begun(). @throws PeerLostError when a rank does not contribute
  /// in time
  virtual void allgather(const void* mine, void* all, std::size_t bytes) = 0;
};

/// The interface to hvd's code for MPI, which is in a separate library: Note [MPI is loaded].
///
/// Thread-safe, except join().
class MpiModule {
 public:
  virtual ~MpiModule() = default;

  /// Whether MPI may be called: hvd or the program has started it, and it has not been finalised.
  virtual bool active() const noexcept = 0;
  /// Whether MPI provides MPI_THREAD_MULTIPLE. False unless active().
  virtual bool threads_multiple() const noexcept = 0;
  virtual std::string library_version() const = 0;
  /// Records that the job has failed, so that MPI is not finalised.
  virtual void forget_peers() noexcept = 0;
  /// Starts MPI if it has not been started, and joins the job. Collective.
  /// @param start_timeout joining fails with PeerLostError if a rank does not join in this time
  /// @param call_timeout limit of one call of MPI; the process ends when a call exceeds it
  virtual std::shared_ptr<MpiJob> join(std::chrono::milliseconds start_timeout,
                                       std::chrono::milliseconds call_timeout) = 0;
};

/// Returns the module, and loads it at the first call. Null if it cannot be loaded.
/// @param reason receives the reason if it cannot
MpiModule* mpi_module(std::string* reason = nullptr);
/// Returns the module if this process uses MPI. Otherwise returns null and does not load it.
MpiModule* mpi_module_in_use();

/// Whether MPI runs with MPI_THREAD_MULTIPLE, or is not in use.
bool mpi_threads_multiple();
/// Whether MPI runs in this process, started by the program or by hvd.
bool mpi_is_active() noexcept;
/// Records that the job has failed. From now on this process does not wait for its peers, not even
/// when it exits.
void forget_job_peers() noexcept;

/// The symbol that the library exports.
struct MpiModuleEntry {
  const char* version;  ///< of hvd
  MpiModule* (*module)();
};

}  // namespace hvd::runtime

/// Weak: null where the module is not linked in.
extern "C" __attribute__((weak)) const hvd::runtime::MpiModuleEntry hvd_mpi_module_entry;
