#pragma once

#include <chrono>
#include <string>

namespace hvd {

/// For a process that holds what may keep its exit handlers from returning, as a GPU does that
/// hangs: from now on exit(), and so a return from main(), ends the process after `limit` at the
/// latest, with the code that it would have had, and says why on standard error. The last call
/// counts. Any thread, exit handlers too.
void limit_exit(std::chrono::milliseconds limit, const std::string& why) noexcept;

}  // namespace hvd
