#pragma once

#include <string>
#include <vector>

namespace hvd::launcher {

/// The shared libraries that an ELF program of this machine's kind names itself (DT_NEEDED), not
/// those that they need in turn. Empty for everything else: a script, a program without shared
/// libraries, a file that cannot be read or is not as it should be. Some microseconds; thread-safe.
std::vector<std::string> needed_libraries(const std::string& path);

}  // namespace hvd::launcher
