#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <thread>

namespace hvd::testing {

/// The names of hvd in /dev/shm whose lock no process holds. Jobs that run hold theirs.
inline std::set<std::string> abandoned_memory() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    const int file = name.starts_with("hvd") ? ::open(entry.path().c_str(), O_RDONLY) : -1;
    if (file < 0) continue;
    if (::flock(file, LOCK_EX | LOCK_NB) == 0) names.insert(name);
    ::close(file);
  }
  return names;
}

/// The names that have been abandoned since `before`. Looks twice, because a name has no lock for a
/// moment when it is made.
inline std::set<std::string> abandoned_memory_since(const std::set<std::string>& before) {
  const std::set<std::string> first = abandoned_memory();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  std::set<std::string> names;
  for (const std::string& name : abandoned_memory())
    if (first.contains(name) && !before.contains(name)) names.insert(name);
  return names;
}

}  // namespace hvd::testing
