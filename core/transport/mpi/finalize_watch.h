#pragma once

#include <chrono>
#include <stop_token>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/process_watch.h"

namespace hvd::mpi {

/// How long MPI_Finalize may take once another rank of this host has ended. The call returns within
/// milliseconds if that rank has called it too.
inline constexpr auto kTimeToFinalize = std::chrono::seconds(5);

/// A thread that ends this process if MPI_Finalize waits for a rank that has ended without it.
///
/// Note [MPI_Finalize]: MPI_Finalize waits until every rank has called it, without a limit if a
/// rank continues to work after hvd::shutdown(). With MPICH and Intel MPI the call never returns if
/// a rank has ended without it, for example by _Exit(). A rank that ends in order has returned from
/// MPI_Finalize before, which shows that all ranks have called it and will return soon. Therefore,
/// once another rank of this host has ended, the call may take `limit` longer; after that this
/// process ends with its exit code. The end of a rank on another host is not detected.
class FinalizeWatch {
 public:
  /// @param neighbours the processes of the other ranks on this host
  /// @param exit_code of this process
  FinalizeWatch(const std::vector<ProcessIdentity>& neighbours, int exit_code,
                std::chrono::milliseconds limit = kTimeToFinalize);
  FinalizeWatch(const FinalizeWatch&) = delete;
  FinalizeWatch& operator=(const FinalizeWatch&) = delete;
  /// Ends the watch.
  ~FinalizeWatch() = default;

 private:
  void run(const std::stop_token&);
  bool stopped_within(const std::stop_token&, std::chrono::milliseconds);

  const int exit_code_;
  const std::chrono::milliseconds limit_;
  std::vector<ProcessWatch> neighbours_;
  Mutex mutex_;
  Condition changed_;
  std::jthread thread_;  // last: it uses the members above
};

}  // namespace hvd::mpi
