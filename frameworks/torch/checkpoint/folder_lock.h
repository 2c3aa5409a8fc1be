#pragma once

#include <filesystem>
#include <string>

namespace hvd::libtorch {

/// The right to write into a folder. One process of all jobs has it at a time, and one object of
/// that process.
///
/// It is a file in the folder that is locked with flock() and names its holder. The kernel gives
/// the lock up when the process ends in any way, so a file that a killed process has left is taken
/// over. Where the file system has no locks, every process gets the right. Not thread-safe.
class FolderLock {
 public:
  /// @throws CheckpointError that names host, process and job of the holder, or when there is no
  /// such folder
  explicit FolderLock(const std::filesystem::path& folder);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  /// Removes the file.
  ~FolderLock();

  static constexpr const char* kName = "lock";

 private:
  bool try_lock();
  std::string holder() const;

  const std::filesystem::path path_;
  int file_ = -1;
};

}  // namespace hvd::libtorch
