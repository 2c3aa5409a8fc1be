// Without MPI, for tests that start ranks and are none themselves.
#include <chrono>
#include <filesystem>
#include <thread>

#include "mpi/support/mpi_test.h"

namespace hvd::testing {

std::vector<std::string> shared_memory_left_behind(const std::string& prefix) {
  const auto exists = [](const std::string& path) { return std::filesystem::exists(path); };
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().filename().string().starts_with(prefix.substr(1)))
      names.push_back(entry.path().string());
  }
  const SteadyClock clock;
  const TimePoint end = clock.now() + std::chrono::seconds(5);
  while (!names.empty() && clock.now() < end) {
    std::erase_if(names, [&](const std::string& path) { return !exists(path); });
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return names;
}

}  // namespace hvd::testing
