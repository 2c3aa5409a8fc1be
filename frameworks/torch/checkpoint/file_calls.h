#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace hvd::libtorch {

/// The calls of the system that change a folder, so that tests can let them fail, or be the last
/// thing that a process does. Results and errno are those of the system. Thread-safe.
class FileCalls {
 public:
  virtual ~FileCalls() = default;

  virtual int open(const std::string& path, int flags, mode_t mode);
  virtual ssize_t write(int file, const void* data, std::size_t bytes);
  virtual int fsync(int file);
  virtual int close(int file);
  virtual int rename(const std::string& from, const std::string& to);
  virtual int mkdir(const std::string& path, mode_t mode);
  virtual int unlink(const std::string& path);
  virtual int rmdir(const std::string& path);

  /// The system's.
  static FileCalls& system();
};

}  // namespace hvd::libtorch
