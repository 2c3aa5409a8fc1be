#pragma once

#include <string>

namespace hvd::runtime {

/// Version and build of the library that holds this function: "0.1.0 (build 3f2a...)". It must be
/// the same on all ranks. The build is the linker's build id; without one the text is the version
/// alone.
std::string build_identity();

}  // namespace hvd::runtime
