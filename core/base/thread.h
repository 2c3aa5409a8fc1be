#pragma once

#include <pthread.h>

#include <thread>
#include <utility>

#include "base/thread_signals.h"

namespace hvd {

/// Starts a thread with asynchronous signals blocked, so that the program's own threads handle
/// them: BlockedSignals. The function may take a std::stop_token, like that of a std::jthread.
/// @param name for the system's tools; at most 15 characters
/// @throws std::system_error when the system has no thread left
template <typename Function>
std::jthread start_thread(const char* name, Function&& function) {
  const BlockedSignals inherited;
  std::jthread thread(std::forward<Function>(function));
  ::pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace hvd
