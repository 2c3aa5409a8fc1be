#pragma once

#include <string>

namespace hvd::runtime {

/// Version and build of the library that this function is in: "0.1.0 (build 3f2a...)". Ranks with
/// different ones are in no job together. The build is the linker's, of what has been linked; where
/// it has written none, the version is all.
std::string build_identity();

}  // namespace hvd::runtime
