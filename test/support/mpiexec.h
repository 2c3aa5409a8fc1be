#pragma once

#include <cstdlib>
#include <string>
#include <vector>

namespace hvd::testing {

/// Runs a rank and stays until the other ranks of this host have ended. Its process keeps the
/// rank's connection to the process manager open, which Hydra (5.0.2) may write to after the rank
/// has ended; it would then end all ranks. hvdrun's supervisors do the same.
inline constexpr const char* kRankOfHydra =
    "lock=${TMPDIR:-/tmp}/hvd-ranks.$PPID; exec 8>>$lock; flock -s 8; \"$@\" 8>&-; code=$?; "
    "flock -u 8; flock -w 30 8; rm -f $lock; exit $code";

/// The start of a command line under which the other ranks go on when one fails.
/// @param mpirun Open MPI's. HVD_TEST_MPIEXEC names the mpiexec of MPICH or Intel MPI to use
/// instead
inline std::vector<std::string> tolerant_mpiexec(const std::string& mpirun, int ranks) {
  const std::string count = std::to_string(ranks);
  const char* const hydra = std::getenv("HVD_TEST_MPIEXEC");
  if (hydra == nullptr)
    return {mpirun,      "--enable-recovery",
            "--mca",     "orte_abort_on_non_zero_status",
            "0",         "--oversubscribe",
            "--bind-to", "none",
            "-np",       count};
  return {hydra, "-disable-auto-cleanup", "-n", count, "bash", "-c", kRankOfHydra, "rank"};
}

/// The same for a shell.
inline std::string tolerant_mpiexec_line(const std::string& mpirun, int ranks) {
  std::string line;
  for (const std::string& word : tolerant_mpiexec(mpirun, ranks)) line += "'" + word + "' ";
  return line;
}

}  // namespace hvd::testing
