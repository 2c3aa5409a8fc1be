#pragma once

#include <string>

// Records the resources that the system has refused to UCX in this process. UCX's calls return
// general errors, and its own thread accepts connections, so no call returns their failures. hvd
// therefore records failed system calls (Note [UCX's descriptors]) and UCX's log. All functions are
// thread-safe.

namespace hvd::ucx {

/// Records a failed system call of UCX, by its errno. Errors that are no shortage are ignored.
void record_failed_call(int error) noexcept;
/// Records an error that UCX has logged.
void record_logged_error(const char* text);

/// The kind of error that a shortage may have caused.
enum class Failure { kInBackground, kOfCall, kOfMemory };

/// Text for users about a recorded shortage that explains the failure, with UCX's own text; empty
/// without one. Removes the record. kInBackground: only descriptors count. kOfMemory: UCX has
/// returned that it has no memory, so no record is needed.
std::string take_recorded_resource_exhaustion(Failure failure);

}  // namespace hvd::ucx
