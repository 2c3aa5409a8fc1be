#include "public/dump_signal.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "engine/runtime.h"

namespace hvd::runtime {
namespace {

// A handler may run on any thread while another ends the runtime, so the end waits until none is
// inside.
std::atomic<Runtime*> target{nullptr};
std::atomic<int> inside{0};
std::atomic<bool> has_been_initialised{false};

void say(const char* text) noexcept {
  const int before = errno;
  // Nobody to tell if it fails.
  static_cast<void>(!::write(STDERR_FILENO, text, std::strlen(text)));
  errno = before;
}

void handle(int) {
  inside.fetch_add(1);
  if (Runtime* const runtime = target.load()) {
    runtime->request_state_dump();
  } else {
    say(has_been_initialised.load() ? "hvd: this rank is not initialised: after hvd::shutdown()\n"
                                    : "hvd: this rank is not initialised: before hvd::init()\n");
  }
  inside.fetch_sub(1);
}

/// Where the signal would end the process, or is ignored: a launcher may have seen to that for the
/// time before there is a handler.
void install() noexcept {
  struct sigaction current {};
  if (::sigaction(SIGUSR1, nullptr, &current) != 0 || (current.sa_flags & SA_SIGINFO) != 0) return;
  if (current.sa_handler != SIG_DFL && current.sa_handler != SIG_IGN) return;
  struct sigaction ours {};
  ours.sa_handler = handle;
  ours.sa_flags = SA_RESTART;
  sigemptyset(&ours.sa_mask);
  ::sigaction(SIGUSR1, &ours, nullptr);
}

// A launcher passes the signal on to every rank, wherever it is.
[[maybe_unused]] const bool installed_when_loaded = [] {
  for (const char* const name : {"HVD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    if (std::getenv(name) == nullptr) continue;
    install();
    return true;
  }
  return false;
}();

}  // namespace

DumpSignal::DumpSignal(Runtime& runtime) {
  has_been_initialised.store(true);
  target.store(&runtime);
  install();
}

DumpSignal::~DumpSignal() {
  target.store(nullptr);
  while (inside.load() > 0) sched_yield();
}

}  // namespace hvd::runtime
