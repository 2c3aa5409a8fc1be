#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace hvd::testing {

/// The number of calls, by the number of the system call.
using SystemCalls = std::map<int, std::uint64_t>;

/// From now on until the process ends the kernel stops at each system call of this process, of
/// whatever thread and library, until a thread of ours has counted it: a filter of seccomp with
/// notifications, which cannot be taken off again, and makes each of them some microseconds slower.
/// Once only. @return why it cannot be done here (an old kernel, a container that forbids it);
/// empty: it is done
std::string begin_to_count_system_calls();

/// The system calls that have begun since then, except those that end a thread or the process.
/// @param thread the id that gettid() returns; 0: all threads
SystemCalls system_calls(int thread = 0);
SystemCalls added(const SystemCalls& before, const SystemCalls& after);
/// "futex 3, epoll_wait 1", or "none".
std::string describe(const SystemCalls&);

}  // namespace hvd::testing
