#pragma once

#include <pthread.h>

#include <csignal>

namespace hvd {

/// Blocks the asynchronous signals of the calling thread while it exists, so that the threads that
/// it starts meanwhile never run a handler of the program. Signals that a thread raises by its own
/// instructions stay unblocked, and so does SIGPROF, with which profilers sample every thread.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t signals;
    ::sigfillset(&signals);
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF})
      ::sigdelset(&signals, signal);
    ::pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace hvd
