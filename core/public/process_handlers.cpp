#include "public/process_handlers.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "engine/runtime.h"
#include "hvd/error.h"
#include "observe/supervisor_notice.h"

namespace hvd::runtime {
namespace {

// The process is as good as dead, so it may not take long; a healthy job needs a few milliseconds.
constexpr Duration kPatience = std::chrono::milliseconds(500);

std::atomic<Runtime*> watched_runtime{nullptr};
std::terminate_handler previous = nullptr;  // written before watched_runtime is set

struct End {
  std::string text;
  StatusCode loss = StatusCode::kOk;  // of another rank, of which this one has been told
  int lost = -1;                      // that rank, if it is known
};

End what_ends_us() {
  const std::exception_ptr error = std::current_exception();
  if (!error) return {"it called std::terminate()"};
  const auto text = [](const std::exception& known) {
    return "it ended with an uncaught exception: " +
           std::string(observe::without_backtrace(known.what()));
  };
  try {
    std::rethrow_exception(error);
  } catch (const PeerLostError& known) {
    return {text(known), StatusCode::kPeerLost, known.rank()};
  } catch (const ShutdownError& known) {
    return {text(known), StatusCode::kShutdown};
  } catch (const std::exception& known) {
    return {text(known)};
  } catch (...) {
    return {"it ended with an uncaught exception of unknown type"};
  }
}

[[noreturn]] void tell_and_die() {
  Runtime* const runtime = watched_runtime.exchange(nullptr);
  if (runtime != nullptr) {
    const End end = what_ends_us();
    // hvdrun before the peers: they may die of the news at once, and be taken for the cause.
    const bool of_a_loss = end.loss != StatusCode::kOk;
    observe::notify_supervisor(of_a_loss ? observe::NoticeKind::kLoss : observe::NoticeKind::kThrow,
                               of_a_loss ? static_cast<int>(end.loss) : 128 + SIGABRT, end.text,
                               end.lost);
    if (!runtime->failed()) {
      runtime->mark_ending();  // the program's own message follows: the log need not repeat it
      const Topology& topology = runtime->topology();
      runtime->notify_before_exit({StatusCode::kPeerLost,
                                   "lost rank " + std::to_string(topology.rank) + " (host " +
                                       topology.host_name(topology.rank) + "): " + end.text,
                                   topology.rank},
                                  kPatience);
    }
  }
  if (previous != nullptr) previous();
  std::abort();
}

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

TerminateHandler::TerminateHandler(Runtime& runtime, bool program_has_mpi) {
  if (std::get_terminate() != tell_and_die) previous = std::set_terminate(tell_and_die);
  watched_runtime.store(&runtime);
  observe::notify_supervisor(observe::NoticeKind::kInitialised, program_has_mpi ? 1 : 0, "");
}

TerminateHandler::~TerminateHandler() {
  watched_runtime.store(nullptr);
  if (std::get_terminate() == tell_and_die) std::set_terminate(previous);
}

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
