#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "system/unique_fd.h"

namespace hvd::launcher {

/// A folder that the processes of a job on this host share. It exists while one of them holds it,
/// and the last one removes it. If the last one is killed, the next job of this user removes the
/// folder with remove_abandoned(). A process holds the folder through a lock of the kernel, which
/// ends with the process and works between containers, where process ids differ. Not thread-safe.
class JobFolder {
 public:
  /// Creates the folder, or joins the processes that hold it. Empty on failure.
  static std::optional<JobFolder> join(const std::filesystem::path& path);
  JobFolder(JobFolder&&) = default;
  JobFolder& operator=(JobFolder&&) = delete;
  ~JobFolder();
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  JobFolder(std::filesystem::path path, UniqueFd lock)
      : path_(std::move(path)), lock_(std::move(lock)) {}

  std::filesystem::path path_;
  UniqueFd lock_;
};

/// Removes this user's folders in `parent` that no process holds and whose names begin with
/// `prefix`.
void remove_abandoned(const std::filesystem::path& parent, std::string_view prefix);

/// Removes the segments of Open MPI that killed processes of this user left in `shm` (/dev/shm). No
/// process maps them, and they are older than the longest start. (hvd removes its own.)
void remove_stale_segments(const std::filesystem::path& shm);

/// A new, empty folder in TMPDIR, which the destructor removes with its content. This process and
/// its children hold its lock, so that remove_abandoned() removes only folders that a killed hvdrun
/// has left. Not thread-safe.
class TemporaryFolder {
 public:
  static constexpr const char* kPrefix = "hvdrun.";
  static std::filesystem::path parent();

  /// @throws LaunchError (kInternal).
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  UniqueFd lock_;
};

}  // namespace hvd::launcher
