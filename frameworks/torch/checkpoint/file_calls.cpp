#include "checkpoint/file_calls.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

namespace hvd::libtorch {

int FileCalls::open(const std::string& path, int flags, mode_t mode) {
  return ::open(path.c_str(), flags, mode);
}
ssize_t FileCalls::write(int file, const void* data, std::size_t bytes) {
  return ::write(file, data, bytes);
}
int FileCalls::fsync(int file) { return ::fsync(file); }
int FileCalls::close(int file) { return ::close(file); }
int FileCalls::rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str());
}
int FileCalls::mkdir(const std::string& path, mode_t mode) { return ::mkdir(path.c_str(), mode); }
int FileCalls::unlink(const std::string& path) { return ::unlink(path.c_str()); }
int FileCalls::rmdir(const std::string& path) { return ::rmdir(path.c_str()); }

FileCalls& FileCalls::system() {
  static FileCalls calls;
  return calls;
}

}  // namespace hvd::libtorch
