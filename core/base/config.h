#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace hvd {

/// The value of HVD_<name>, or of HOROVOD_<name>; unset and empty are the same.
std::optional<std::string> env_string(const std::string& name);
/// @throws UsageError naming the variable, what was expected and what it holds.
std::optional<std::int64_t> env_int(const std::string& name, std::int64_t lowest, std::int64_t highest);
/// Seconds, fractions allowed, as milliseconds. @throws UsageError as above.
std::optional<std::chrono::milliseconds> env_seconds(const std::string& name);

}  // namespace hvd
