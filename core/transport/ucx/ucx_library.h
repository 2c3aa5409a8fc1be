#pragma once

#include <memory>
#include <string>

#include "transport/ucx/workers.h"

namespace hvd::ucx {

inline constexpr const char* kSystemLibrary = "libucp.so.0";

/// Workers of the UCX that is loaded when it is first asked for, and never unloaded. Thread-safe.
///
/// Before it is loaded, the environment gets what hvd needs of UCX, where the user has not said
/// otherwise: Note [What UCX is told] in ucx_library.cpp. What UCX logs goes into hvd's log.
/// @throws hvd::Error when there is none or it is too old, with what to install
Workers open_workers(const std::string& library = kSystemLibrary);

/// "1.13.1 (libucp.so.0)", or why it cannot be used. For people. Loads it.
std::string describe_library(const std::string& library = kSystemLibrary);

}  // namespace hvd::ucx
