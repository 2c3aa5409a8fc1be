#pragma once

#include <string>

namespace hvd::launcher {

/// What --check-build prints: versions of hvdrun, mpirun and LibTorch, and
/// hvd::build_info(): what the runtime was built with, what was left out and why.
///
/// The runtime is asked through a program of its own, hvd-build-info, which lies beside hvdrun:
/// hvdrun itself, which runs once per rank, loads no MPI, and a runtime that cannot be loaded is
/// one line of this report.
std::string check_build(const std::string& mpirun);

}  // namespace hvd::launcher
