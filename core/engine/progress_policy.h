#pragma once

#include <optional>
#include <string>

#include "base/cpu_quota.h"
#include "hvd/options.h"

namespace hvd::runtime {

/// Which threads make progress, and how they wait, on the cores that a rank has.
struct ProgressPolicy {
  bool inline_progress = false;  ///< submitting threads make what progress they can at once
  bool spins = false;            ///< a waiting thread spins for a moment before it yields its core
};

/// @param ranks of this host
/// @param quota what cgroups grant this process, in CPUs, which the ranks of this host share
ProgressPolicy choose_progress_policy(ProgressMode, int ranks,
                                      std::optional<double> quota = cpu_quota());

/// For messages: "inline progress, 1 core per rank".
std::string describe(const ProgressPolicy&, int ranks, std::optional<double> quota = cpu_quota());

}  // namespace hvd::runtime
