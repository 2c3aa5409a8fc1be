#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace hvd::testing {

/// The number of calls, by the number of the system call.
using SystemCalls = std::map<int, std::uint64_t>;

/// Starts to count the system calls of all threads and libraries of this process, until it ends. A
/// seccomp filter with notifications stops each call until a thread of this file has counted it,
/// which makes each call some microseconds slower. The filter cannot be removed. Call it once only.
/// @return empty on success, otherwise the reason why counting is impossible (an old kernel, a
/// container that forbids it)
std::string begin_to_count_system_calls();

/// The system calls that have begun since then, except those that end a thread or the process.
/// @param thread the id that gettid() returns; 0: all threads
SystemCalls system_calls(int thread = 0);
SystemCalls added(const SystemCalls& before, const SystemCalls& after);
/// "futex 3, epoll_wait 1", or "none".
std::string describe(const SystemCalls&);

}  // namespace hvd::testing
