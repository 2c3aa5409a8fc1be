#pragma once

#include <string>

namespace hvd::launcher {

/// The output of --check-build: the versions of hvdrun, mpirun and LibTorch, and hvd::build_info(),
/// which lists the parts that the runtime was built with and the reasons for missing ones.
///
/// A separate program beside hvdrun, hvd-build-info, loads the runtime and prints its information.
/// hvdrun runs once per rank and should not load MPI, and a runtime that cannot be loaded costs
/// only one line of this report.
std::string check_build(const std::string& mpirun);

}  // namespace hvd::launcher
