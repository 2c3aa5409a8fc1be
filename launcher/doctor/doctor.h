#pragma once

#include <string>
#include <vector>

namespace hvd::launcher::doctor {

/// Runs `hvdrun doctor`, prints its report, and returns the exit code: 0, or 1 if a finding is an
/// error.
/// @param arguments those after the word "doctor"
/// @throws LaunchError (kUsage) for a wrong command line; (kNotFound) when hvd-doctor-rank is not
/// installed
int run_doctor(const std::vector<std::string>& arguments);

}  // namespace hvd::launcher::doctor
