#pragma once

#include <optional>
#include <string>

#include "base/cpu_quota.h"
#include "hvd/options.h"

namespace hvd::runtime {

/// How a rank uses the cores it has.
struct Pace {
  bool inline_progress = false;  ///< submitting threads do at once what can be done at once
  bool spins = false;  ///< a thread that waits keeps its core for a moment before it gives it away
};

/// @param ranks of this host
/// @param quota what cgroups grant this process, in CPUs, which the ranks of this host share
Pace choose_pace(ProgressMode, int ranks, std::optional<double> quota = cpu_quota());

/// For people: "inline progress, 1 core per rank".
std::string describe(const Pace&, int ranks, std::optional<double> quota = cpu_quota());

}  // namespace hvd::runtime
