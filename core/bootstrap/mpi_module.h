#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "bootstrap/world.h"

namespace hvd::runtime {

struct MpiJoinOptions {
  /// PeerLostError when a rank has not arrived by then.
  std::chrono::milliseconds start_timeout = std::chrono::seconds(300);
  /// A call of MPI that takes longer does not return: the process ends.
  std::chrono::milliseconds call_timeout = std::chrono::seconds(15);
};

/// All that hvd asks of MPI. One file implements it, which alone knows what wraps MPI, and is in a
/// library of its own: Note [MPI is loaded].
///
/// Thread-safe, but for join().
class MpiModule {
 public:
  virtual ~MpiModule() = default;

  /// Calls of MPI are possible: it has been started, by hvd or by the program, and has not ended.
  virtual bool active() const noexcept = 0;
  /// It runs with MPI_THREAD_MULTIPLE. False unless active().
  virtual bool threads_multiple() const noexcept = 0;
  virtual std::string library_version() const = 0;
  /// The job has failed: MPI is not asked to end in order any more.
  virtual void forget_peers() noexcept = 0;
  /// Starts MPI, if nobody has, and meets the other ranks. Collective.
  virtual std::shared_ptr<World> join(const MpiJoinOptions&) = 0;
};

/// The process's, which is loaded if it has not been. Null: there is none. @param reason why not
MpiModule* mpi_module(std::string* reason = nullptr);
/// The same where this process has something to do with MPI; else null, and nothing is loaded.
MpiModule* mpi_module_in_use();

/// What the library shows.
struct MpiModuleEntry {
  const char* version;  ///< hvd's
  MpiModule* (*module)();
};

}  // namespace hvd::runtime

/// Weak: null where the module is not linked in.
extern "C" __attribute__((weak)) const hvd::runtime::MpiModuleEntry hvd_mpi_module_entry;
