#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hvd::launcher::doctor {

/// "64 MiB", "23.4 GiB".
std::string format_bytes(std::uint64_t bytes);
/// Three significant digits: "0.5", "12.3", "1230".
std::string format_number(double value);
/// "0.5 us", "12 ms", "3 s".
std::string format_seconds(double seconds);
/// "1024" or "unlimited".
std::string format_limit(const std::optional<std::uint64_t>& limit);
/// "0-3,8".
std::string format_cpus(const std::vector<int>& cpus);

}  // namespace hvd::launcher::doctor
