#pragma once

#include <filesystem>
#include <optional>

namespace hvd {

/// The smallest CPU quota of this process's cgroups, in CPUs; empty without a limit. `root`
/// replaces
/// "/" in tests. hvdrun compiles this file too.
std::optional<double> cpu_quota(const std::filesystem::path& root = "/");

}  // namespace hvd
