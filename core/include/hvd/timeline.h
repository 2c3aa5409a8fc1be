#pragma once

#include <string>

namespace hvd {

/// @addtogroup observe
/// @{

/// Starts a Chrome trace (chrome://tracing, Perfetto) of this rank's operations. "{rank}" in the
/// path is replaced by the rank; without it ".rankN" goes before the extension.
/// @throws UsageError when one is running already or the file cannot be written.
void start_timeline(const std::string& path);
/// Completes the file. No effect when no timeline is running.
void stop_timeline();

/// @}

}  // namespace hvd
