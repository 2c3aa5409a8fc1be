#pragma once

#include <filesystem>
#include <optional>
#include <string_view>

#include "system/unique_fd.h"

namespace hvd::launcher {

/// A folder that the processes of a job on this host share. It is there as long as one of them
/// holds it, and the last one removes it. What a killed process could not remove, the next job of
/// this user does: remove_abandoned(). The lock is the kernel's, so it ends with its holders, and
/// it is seen from other containers, where process numbers mean nothing. Not thread-safe.
class JobFolder {
 public:
  /// Makes it, or joins those who have it. Nothing when that is not possible.
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

/// Removes the folders of `parent` whose names begin with `prefix` that are this user's and that no
/// process holds.
void remove_abandoned(const std::filesystem::path& parent, std::string_view prefix);

/// Removes the segments of Open MPI that killed processes of this user left in `shm` (/dev/shm):
/// that no process uses, and that are older than any start takes. (hvd removes its own.)
void remove_stale_segments(const std::filesystem::path& shm);

}  // namespace hvd::launcher
