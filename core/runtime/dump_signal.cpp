#include "runtime/dump_signal.h"

#include <sched.h>
#include <signal.h>

#include <atomic>

#include "runtime/runtime.h"

namespace hvd::runtime {
namespace {

// A handler may run on any thread while another ends the runtime, so the end waits until none is inside.
std::atomic<Runtime*> target{nullptr};
std::atomic<int> inside{0};

void handle(int) {
  inside.fetch_add(1);
  if (Runtime* const runtime = target.load()) runtime->request_state_dump();
  inside.fetch_sub(1);
}

}  // namespace

DumpSignal::DumpSignal(Runtime& runtime) {
  struct sigaction current {};
  if (::sigaction(SIGUSR1, nullptr, &current) != 0 || (current.sa_flags & SA_SIGINFO) != 0 || current.sa_handler != SIG_DFL) return;
  target.store(&runtime);
  struct sigaction ours {};
  ours.sa_handler = handle;
  ours.sa_flags = SA_RESTART;
  sigemptyset(&ours.sa_mask);
  installed_ = ::sigaction(SIGUSR1, &ours, nullptr) == 0;
}

DumpSignal::~DumpSignal() {
  if (!installed_) return;
  struct sigaction current {};
  // Still ours? The program may have put its own handler there since.
  const bool ours = ::sigaction(SIGUSR1, nullptr, &current) == 0 && (current.sa_flags & SA_SIGINFO) == 0 && current.sa_handler == handle;
  if (ours) ::signal(SIGUSR1, SIG_DFL);
  target.store(nullptr);
  while (inside.load() > 0) sched_yield();
}

}  // namespace hvd::runtime
