#pragma once

#include <string>
#include <vector>

namespace hvd {

/// The shared libraries that an ELF program of this architecture names (DT_NEEDED), without those
/// that they need in turn. Empty for a script, a program without shared libraries, and a file that
/// is malformed or cannot be read. Takes some microseconds; thread-safe.
std::vector<std::string> needed_libraries(const std::string& path);

}  // namespace hvd
