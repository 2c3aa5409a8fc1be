#pragma once

#include <filesystem>

namespace hvd::launcher {

/// A new, empty folder in TMPDIR, removed with its content at the end. Not thread-safe.
class TemporaryFolder {
 public:
  /// @throws LaunchError (kInternal).
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace hvd::launcher
