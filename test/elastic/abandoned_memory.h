#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <charconv>
#include <filesystem>
#include <set>
#include <string>

namespace hvd::testing {

/// The segment files in /dev/shm that are named after one of these processes and whose lock no
/// process holds. A file is named after the first rank of its host, which made it. Other jobs,
/// which may run at the same time, are ignored.
inline std::set<std::string> abandoned_memory(const std::set<pid_t>& first_ranks) {
  const std::string prefix = "hvd-segment-";
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    pid_t pid = 0;
    if (!name.starts_with(prefix)) continue;
    std::from_chars(name.data() + prefix.size(), name.data() + name.size(), pid);
    const int file = first_ranks.contains(pid) ? ::open(entry.path().c_str(), O_RDONLY) : -1;
    if (file < 0) continue;
    if (::flock(file, LOCK_EX | LOCK_NB) == 0) names.insert(name);
    ::close(file);
  }
  return names;
}

}  // namespace hvd::testing
