#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "system/unique_fd.h"

namespace hvd::launcher {

/// A folder that the processes of a job on this host share. It exists while one of them holds it,
/// and the last one removes it. If that one is killed, the next job of this user removes it:
/// remove_abandoned(). The lock is the kernel's, so it ends with its holders, and it works between
/// containers, where process ids differ. Not thread-safe.
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

/// Removes this user's folders in `parent` with names that begin with `prefix` and that no process
/// holds.
void remove_abandoned(const std::filesystem::path& parent, std::string_view prefix);

/// Removes the segments of Open MPI that killed processes of this user left in `shm` (/dev/shm):
/// those that no process maps and that are older than any start takes. (hvd removes its own.)
void remove_stale_segments(const std::filesystem::path& shm);

/// A new, empty folder in TMPDIR, removed with its content at the end. It is locked by this process
/// and its children, so that remove_abandoned() of job_folder.h finds a folder that a killed hvdrun
/// left. Not thread-safe.
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
