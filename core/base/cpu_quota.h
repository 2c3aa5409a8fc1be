#pragma once

#include <filesystem>
#include <optional>

namespace hvd {

/// The least of what the cgroups of this process grant it, in CPUs; nothing when they do not limit
/// it. `root` stands for "/", for tests. hvdrun compiles it too.
std::optional<double> cpu_quota(const std::filesystem::path& root = "/");

}  // namespace hvd
