#pragma once

#include <string>

namespace hvd::runtime {

/// Version and build of the library that holds this function: "0.1.0 (build 3f2a...)". Ranks must
/// have the same. The build is the linker's build id; without one the text is the version alone.
std::string build_identity();

}  // namespace hvd::runtime
