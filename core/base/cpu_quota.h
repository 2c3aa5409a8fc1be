#pragma once

#include <filesystem>
#include <optional>

namespace hvd {

/// Returns the smallest CPU quota of this process's cgroups, in CPUs; empty if there is no limit.
/// hvdrun compiles this file too.
/// @param root another root folder, for tests
std::optional<double> cpu_quota(const std::filesystem::path& root = "/");

}  // namespace hvd
