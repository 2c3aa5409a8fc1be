#pragma once

#include <sys/types.h>

#include <vector>

namespace hvd::launcher {

/// The living processes of a process group.
std::vector<pid_t> group_members(pid_t group);

/// Whether a process has a handler for a signal, so that the signal does not end it.
bool handles(pid_t process, int signal);

}  // namespace hvd::launcher
