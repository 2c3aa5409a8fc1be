#pragma once

#include <filesystem>
#include <string>

namespace hvd::libtorch {

/// Locks a folder for writing. One process of all jobs can lock it at a time, with one object.
///
/// The lock is a file in the folder, locked with flock(), with the name of the holder. The kernel
/// releases it when the process ends, so the file of a killed process does not block others. On
/// file systems without locks every process succeeds. Not thread-safe.
class FolderLock {
 public:
  /// @throws CheckpointError with host, process and job of the holder, or when the folder does not
  /// exist
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
