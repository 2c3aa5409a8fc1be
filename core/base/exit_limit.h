#pragma once

#include <chrono>
#include <string>

namespace hvd {

/// Limits the time that exit(), and a return from main(), may take from now on. Meant for a process
/// whose exit handlers may never return, for example because a GPU hangs. After `limit` the process
/// ends with its exit code and a line on standard error that gives the reason. The last call
/// counts. Any thread may call it, exit handlers included.
void limit_exit(std::chrono::milliseconds limit, const std::string& why) noexcept;

}  // namespace hvd
