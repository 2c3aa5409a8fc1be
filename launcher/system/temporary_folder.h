#pragma once

#include <filesystem>

#include "system/unique_fd.h"

namespace hvd::launcher {

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
