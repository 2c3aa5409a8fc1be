#include "system/process_group.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace hvd::launcher {

std::vector<pid_t> group_members(pid_t group) {
  std::vector<pid_t> members;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const pid_t process = std::atoi(name.c_str());
    if (::getpgid(process) == group) members.push_back(process);
  }
  return members;
}

bool handles(pid_t process, int signal) {
  constexpr std::string_view kCaught = "SigCgt:";
  std::ifstream status("/proc/" + std::to_string(process) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(kCaught)) continue;
    const std::uint64_t mask = std::strtoull(line.c_str() + kCaught.size(), nullptr, 16);
    return (mask >> (signal - 1) & 1) != 0;
  }
  return false;
}

}  // namespace hvd::launcher
