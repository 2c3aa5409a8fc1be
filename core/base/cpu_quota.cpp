#include "base/cpu_quota.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace hvd {
namespace {

std::optional<std::string> first_line(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string line;
  return std::getline(file, line) ? std::optional<std::string>(line) : std::nullopt;
}

/// Reads a quota of cgroup version 2, such as "max 100000" or "150000 100000".
std::optional<double> quota_of_v2(const std::filesystem::path& group) {
  const auto line = first_line(group / "cpu.max");
  double quota = 0, period = 0;
  if (!line || !(std::istringstream(*line) >> quota >> period) || quota <= 0 || period <= 0)
    return std::nullopt;
  return quota / period;
}

std::optional<double> quota_of_v1(const std::filesystem::path& group) {
  const auto quota = first_line(group / "cpu.cfs_quota_us");
  const auto period = first_line(group / "cpu.cfs_period_us");
  if (!quota || !period) return std::nullopt;
  const double taken = std::atof(quota->c_str()), of = std::atof(period->c_str());
  if (taken <= 0 || of <= 0) return std::nullopt;  // -1: no limit
  return taken / of;
}

}  // namespace

std::optional<double> cpu_quota(const std::filesystem::path& root) {
  std::optional<double> least;
  const auto consider = [&least](const std::optional<double>& quota) {
    if (quota && (!least || *quota < *least)) least = quota;
  };
  const std::filesystem::path mount = root / "sys/fs/cgroup";
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    // "0::/a/b" of version 2, "4:cpu,cpuacct:/a/b" of version 1
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && (',' + controllers + ',').find(",cpu,") == std::string::npos) continue;
    // The limits of all parent groups apply too. In a container the path may be the host's, while
    // only the last group is visible, mounted as the root.
    std::filesystem::path group = std::filesystem::path(line.substr(second + 1)).relative_path();
    const std::filesystem::path base = v2 ? mount : mount / controllers;
    while (true) {
      consider(v2 ? quota_of_v2(base / group) : quota_of_v1(base / group));
      if (!v2) consider(quota_of_v1(mount / "cpu" / group));
      if (group.empty()) break;
      group = group.parent_path();
    }
  }
  return least;
}

}  // namespace hvd
