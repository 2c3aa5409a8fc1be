#include "temporary_folder.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>

#include "error.h"

namespace hvd::launcher {

TemporaryFolder::TemporaryFolder() {
  const char* base = std::getenv("TMPDIR");
  std::string pattern = base != nullptr && *base != '\0' ? base : "/tmp";
  pattern += "/hvdrun.XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw LaunchError(ExitCode::kInternal, "cannot make a folder " + pattern + ": " +
                                               std::strerror(errno) +
                                               "; expected a writable /tmp, or TMPDIR to name one");
  }
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace hvd::launcher
