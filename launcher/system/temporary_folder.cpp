#include "system/temporary_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>

#include "system/error.h"

namespace hvd::launcher {

std::filesystem::path TemporaryFolder::parent() {
  const char* base = std::getenv("TMPDIR");
  return base != nullptr && *base != '\0' ? base : "/tmp";
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = parent() / (std::string(kPrefix) + "XXXXXX");
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw LaunchError(ExitCode::kInternal, "cannot make a folder " + pattern + ": " +
                                               std::strerror(errno) +
                                               "; expected a writable /tmp, or TMPDIR to name one");
  }
  path_ = pattern;
  // Not closed on exec: mpirun, which uses the folder, may outlive hvdrun.
  lock_ = UniqueFd(::open(pattern.c_str(), O_RDONLY | O_DIRECTORY));
  if (lock_) ::flock(lock_.get(), LOCK_SH);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace hvd::launcher
