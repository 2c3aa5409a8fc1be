#include "checkpoint/termination_notice.h"

#include <signal.h>

#include <atomic>

namespace hvd::libtorch {
namespace {

std::atomic<int> notices{0};
std::atomic<bool> noticed{false};
static_assert(std::atomic<bool>::is_always_lock_free, "written by a signal handler");
struct sigaction former_action {};  // only written while the handler is not installed

void record_sigterm(int number, siginfo_t* info, void* context) {
  noticed.store(true);
  if ((former_action.sa_flags & SA_SIGINFO) != 0) {
    former_action.sa_sigaction(number, info, context);
  } else if (former_action.sa_handler != SIG_DFL && former_action.sa_handler != SIG_IGN) {
    former_action.sa_handler(number);
  }
}

}  // namespace

TerminationNotice::TerminationNotice() {
  if (notices++ > 0) return;
  noticed.store(false);
  ::sigaction(SIGTERM, nullptr, &former_action);
  struct sigaction action {};
  action.sa_sigaction = record_sigterm;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGTERM, &action, nullptr);
}

TerminationNotice::~TerminationNotice() {
  if (--notices == 0) ::sigaction(SIGTERM, &former_action, nullptr);
}

bool TerminationNotice::given() noexcept { return noticed.load(); }

}  // namespace hvd::libtorch
