#pragma once

#include <filesystem>

#include "system/unique_fd.h"

namespace hvd::launcher {

/// A new, empty folder in TMPDIR, removed with its content at the end. It is locked by this process
/// and those that it starts, so that what a killed hvdrun leaves can be told: remove_abandoned() of
/// job_folder.h. Not thread-safe.
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
